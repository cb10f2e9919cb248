"""Pipeline stages, their point-to-point messages, and backwards split into input and weight gradients."""
