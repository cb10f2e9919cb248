"""The optimizer: clipping by the global norm, the vote, the learning rate, the update."""
