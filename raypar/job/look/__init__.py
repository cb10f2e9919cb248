"""Looking inside the actors of a run: weights, gradients, tiles of tensors."""
