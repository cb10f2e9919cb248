"""Training data: from text files and user functions to the batches of a step."""
