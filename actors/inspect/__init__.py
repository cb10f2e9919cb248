"""Inspection of a step: values, norms, recordings."""
