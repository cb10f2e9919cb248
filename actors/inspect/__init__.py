"""What can be seen of a step: values, norms, recordings."""
