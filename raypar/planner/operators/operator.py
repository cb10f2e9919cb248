"""An operator: a module of a user's model, as the search for its strategy sees it."""

from __future__ import annotations

from typing import Literal, NamedTuple

OperatorKind = Literal["linear", "embedding", "norm", "activation", "dropout", "view", "samples", "whole"]
Aim = Literal["speed", "memory"]
"""What a search makes small first: the time of a step, or the weights that an actor has."""


class Operator(NamedTuple):
    """A module that is given one tensor and makes one.

    Attributes:
        name: Its logical name.
        kind: What it is: "view" gives samples another shape, "samples" computes each by itself, and of "whole" nothing
            is known.
        taken: Shape of its whole input.
        made: Shape of its whole output.
        weights: Elements of its parameters.
        bias: Elements of them that are a bias.
        splits: Dims along which it may be split.
        learns: Whether the gradient of its input is needed.
        strategy: The strategy that the user has annotated; "" for none.
        given: Placement of its input that the user has annotated; "" for none.
        goes: Placement of its output that the user has annotated; "" for none.
        rigid: Whether nothing can be put in front of it or behind it.
    """

    name: str
    kind: OperatorKind
    taken: tuple[int, ...]
    made: tuple[int, ...]
    weights: int = 0
    bias: int = 0
    splits: tuple[int, ...] = ()
    learns: bool = True
    strategy: str = ""
    given: str = ""
    goes: str = ""
    rigid: bool = False


Chain = tuple[Operator, ...]  # each takes what the one before makes; what the first takes and the last makes is whole
