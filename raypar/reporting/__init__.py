"""The results of a run: step reports, progress display, run folders, trackers, summaries and the HTML report."""
