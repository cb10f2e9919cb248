"""The steps of a run: the training loop, evaluations, steps ahead and by hand."""
