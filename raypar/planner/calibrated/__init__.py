"""Measured costs: the calibration, its file, and the costs of actions that it predicts."""
