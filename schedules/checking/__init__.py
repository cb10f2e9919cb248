"""The proof that a schedule is complete, ordered, bounded and free of deadlock."""
