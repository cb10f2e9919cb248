"""What a run costs, computed before it starts."""
