"""Plain descriptions of models, data and optimizers, and the results that actors report. No torch."""
