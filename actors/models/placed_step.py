"""A step of a user's plan that redistributes tensors over the actors of tp."""

from __future__ import annotations

from typing import Literal, NamedTuple

FEATURES = "S-1"  # split along the last dim, whatever its number


class PlacedStep(NamedTuple):
    """What is done to a module, or to what goes in or out of it.

    Placements are as in ``collective.routes``; "S-1" splits the last dim.

    Attributes:
        what: "input" and "output" redistribute; "row" and "vocab" shard a module whose outputs are then summed; "split"
            lets each member compute its part along a dim, with whole weights.
        before: The placement of the tensor.
        after: The placement that it gets.
        gradient: The placement of the gradient that comes back through this step.
    """

    what: Literal["input", "output", "row", "vocab", "split"]
    before: str
    after: str
    gradient: str
