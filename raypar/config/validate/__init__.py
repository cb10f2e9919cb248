"""What crosses several specs of a run and can be wrong."""
