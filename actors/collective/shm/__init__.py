"""The shared-memory backend: groups of actors on one node."""
