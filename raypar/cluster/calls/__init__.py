"""Calls to a job's actors, their answers and deadlines."""
