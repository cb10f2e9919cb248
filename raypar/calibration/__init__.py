"""``raypar calibrate``: measures what predictions need on the user's machine or cluster, on actors like a run's."""
