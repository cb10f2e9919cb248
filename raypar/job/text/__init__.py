"""Texts that a job's actors generate and score."""
