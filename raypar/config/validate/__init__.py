"""Checks that involve several fields of a run. What concerns one spec alone is in the spec's own ``faults``."""
