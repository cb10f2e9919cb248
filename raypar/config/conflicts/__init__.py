"""Which fields of a run contradict each other. What concerns one spec alone is in the spec's own ``faults``."""
