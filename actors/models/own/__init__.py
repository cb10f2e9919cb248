"""Models of the user's own modules, or of transformers': layers, plans of tensor parallelism, source lines."""
