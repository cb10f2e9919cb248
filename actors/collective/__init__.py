"""Collective and point-to-point communication between the ranks of a group, with CPU and GPU backends."""
