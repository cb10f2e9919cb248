"""An operator: a module of a user's model, as the search for its strategy sees it."""

from __future__ import annotations

from typing import Literal, NamedTuple

OperatorKind = Literal["linear", "embedding", "norm", "activation", "dropout", "view", "samples", "whole"]
Aim = Literal["speed", "memory"]
"""What a search minimises first: the time of a step, or the weights of an actor."""


class Operator(NamedTuple):
    """A module with one input tensor and one output tensor.

    Attributes:
        name: Its logical name.
        kind: Its kind: "view" reshapes samples, "samples" computes each one separately, and a "whole" module is not
            divided.
        taken: Shape of its whole input.
        made: Shape of its whole output.
        weights: Elements of its parameters.
        bias: Elements of them that are a bias.
        splits: Dims along which it may be split.
        learns: Whether the gradient of its input is needed.
        strategy: The strategy that the user has annotated; "" for none.
        given: Placement of its input that the user has annotated; "" for none.
        goes: Placement of its output that the user has annotated; "" for none.
        rigid: Whether no redistribution can be put before it or after it.
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


Chain = tuple[Operator, ...]  # each one's input is the output before it; the first input and last output are whole
