"""a run's report as one HTML file: no script, nothing from a network"""
