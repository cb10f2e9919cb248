"""Context parallelism: a sequence divided over actors, and the attention that reaches across."""
