"""Initial weights: building modules without them, making those of some layers, casting them, and checks."""
