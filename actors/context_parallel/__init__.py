"""Context parallelism: sequences sharded over ranks, and attention that reaches the tokens of other ranks."""
