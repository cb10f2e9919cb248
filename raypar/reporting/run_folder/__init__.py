"""Run folders: all that a run leaves behind, written while it trains and read again without believing it."""
