"""Groups between Ray actors, and Ray's private names that they need."""
