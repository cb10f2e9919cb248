"""End of a training step: the vote on finiteness, clipping by the global norm, the learning rate, the update."""
