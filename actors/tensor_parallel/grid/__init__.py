"""Tensor parallelism on grids: SUMMA in 2D and 2.5D, and 3D."""
