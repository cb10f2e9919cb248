"""The check that a schedule is complete, in order, within its memory bound and free of deadlock."""
