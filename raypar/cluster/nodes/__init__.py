"""The nodes of a cluster: which there are, functions called on them, and drain notices."""
