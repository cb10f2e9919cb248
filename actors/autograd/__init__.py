"""Backward passes and recomputation on top of torch's autograd engine."""
