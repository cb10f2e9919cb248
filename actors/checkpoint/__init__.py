"""Checkpoints on the actor's side: write and read shards of logical tensors."""
