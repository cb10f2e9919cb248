"""Several runs on one cluster on paper."""
