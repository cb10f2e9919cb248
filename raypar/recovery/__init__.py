"""Recovery from the death of actors, and faults that are injected on purpose."""

from raypar.recovery import chaos as chaos
