"""Passes over a schedule, rows to rows: each adds or replaces actions and returns a new schedule."""
