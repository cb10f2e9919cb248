"""Trackers: services and files that get the figures of a run while it trains."""
