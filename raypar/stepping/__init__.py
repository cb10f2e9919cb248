"""Training steps by hand: the stepper, what it shows, and recordings of a stage that are played alone."""
