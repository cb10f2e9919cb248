"""The connection to Ray: joining a cluster, placing actors, and calling them."""

import os

# Before the first import of ray, which reads it: Ray's own words for a dead actor would stand before raypar's sentence.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed while executing a task")
