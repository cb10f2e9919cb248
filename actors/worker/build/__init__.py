"""How a worker is built from its plan."""
