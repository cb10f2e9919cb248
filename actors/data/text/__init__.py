"""Text as tokens: its files, their conversion, the windows of a batch."""
