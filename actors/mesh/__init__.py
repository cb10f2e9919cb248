"""The mesh of ranks: its named axes, tensor-parallel grids, and the members of every group."""
