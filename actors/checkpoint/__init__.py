"""What an actor writes into a checkpoint and reads from one: shards of logical tensors."""
