"""A schedule performed on paper: which action starts when, given the cost of each."""
