"""Recovery: what a run does when an actor dies, and how to make one die on purpose."""

from raypar.recovery import chaos as chaos
