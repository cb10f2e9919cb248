"""Trackers: where the figures of a run are sent while it trains."""
