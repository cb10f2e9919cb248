"""Tensor parallelism: column and row linear layers, vocabulary-parallel loss, sequence parallelism."""
