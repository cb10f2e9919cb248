"""What a run leaves for people: reports, records, progress, summaries."""
