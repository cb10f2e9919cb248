"""Plain data that describes a run (model, data, optimizer) and the results that actors report. Imports no torch."""
