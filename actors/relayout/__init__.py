"""A run that goes on in another layout: who gives what to whom, and how it goes from actor to actor."""
