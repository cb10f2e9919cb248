"""The report of a run as one HTML file, without scripts and without network access."""
