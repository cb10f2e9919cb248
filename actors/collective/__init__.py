"""Implementations of the Group noun: how tensors move between members, on CPUs and GPUs."""
