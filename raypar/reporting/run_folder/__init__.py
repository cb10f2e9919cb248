"""Run folders: the files of a run, written while it trains, and read again without trusting their content."""
