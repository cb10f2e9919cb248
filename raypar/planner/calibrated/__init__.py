"""Costs that were measured: the calibration, its file, and what it predicts."""
