"""A run that goes on after a failure, away from nodes that are taken away, or in another layout."""
