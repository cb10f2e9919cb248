"""Training steps performed by hand: the stepper, its views, and recordings of a stage for a replay without others."""
