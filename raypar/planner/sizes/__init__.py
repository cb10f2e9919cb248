"""The numbers of parameters, by tensor and by actor."""
