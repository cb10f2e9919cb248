"""Data parallelism: gradient buckets, their reduction, the sharded optimizer, parameter servers."""
