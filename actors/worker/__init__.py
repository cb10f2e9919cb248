"""The actors' classes: workers and parameter servers, and how they are built from a plan."""
