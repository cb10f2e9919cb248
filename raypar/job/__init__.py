"""The job: a run and the actors that train it."""
