"""The job: a run on its actors."""
