"""Backward passes and recomputation on top of torch's autograd, and the private names of torch that the actors use."""
