"""Training steps performed by hand: the stepper, its views, and recordings of a stage that can be replayed alone."""
