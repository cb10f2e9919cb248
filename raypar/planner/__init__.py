"""The planner: what a run costs, computed before it starts."""
