"""The shared-memory backend for groups whose members are on one node."""
