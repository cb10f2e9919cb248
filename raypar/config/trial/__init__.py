"""Trials of the user's layers, loss and data on the first batch, before actors start."""
