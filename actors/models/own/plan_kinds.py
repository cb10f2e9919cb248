"""The kinds of a user's plan of tensor parallelism: a strategy, and the placements of its input and output.

A kind reads "column", "row to S0" or "split0 from R to R". Placements are R (whole), S-1 (split by features, the last
dim), S0, S1, ... (split along that dim: samples, tokens).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from torch import nn

from raypar.actors.models.base import Kind
from raypar.actors.models.placed_step import FEATURES, PlacedStep

_COLUMN = {"weight": 0, "bias": 0}
_SPLIT = re.compile(r"split(\d)")
_PLACEMENT = re.compile(r"R|S-1|S\d")
SHORT = {  # words for kinds that are frequent
    "column_gather_output": "column to R",
    "column_gather_input": "column from S-1",
    "row_split_input": "row from R",
}


class Strategy(NamedTuple):
    """How tensor parallelism changes a module.

    Attributes:
        of: Type of the modules that it applies to.
        needs: Placement of the input that the module computes with.
        gradient: Placement of the gradient of this input, as members compute it.
        gives: Placement of the output as the module computes it.
        usual: Placement of the output if a plan names none.
        dims: The dim along which each parameter is sharded, by the parameter's name in the module.
        size: The module's attribute that holds the length of that dim; "" if nothing is sharded.
    """

    of: type[nn.Module]
    needs: str = "R"
    gradient: str = "R"
    gives: str = "R"
    usual: str = "R"
    dims: Mapping[str, int] = {}
    size: str = ""


_STRATEGIES: Mapping[str, Strategy] = {
    "column": Strategy(nn.Linear, "R", "P", FEATURES, FEATURES, _COLUMN, "out_features"),
    "row": Strategy(nn.Linear, FEATURES, FEATURES, "P", "R", {"weight": 1}, "in_features"),
    "embedding": Strategy(nn.Embedding, "R", "R", "P", "R", {"weight": 0}, "num_embeddings"),
    "replicated": Strategy(nn.Module),
}
_OTHERS: Mapping[str, tuple[type[nn.Module], Kind]] = {  # modules that keep the division of their input, or need none
    "dropout": (nn.Dropout, "dropout"),
    "shared": (nn.Module, "shared"),
    "expert": (nn.ModuleList, "expert"),
}
PASSING = tuple(_OTHERS)
_KNOWN: Mapping[tuple[str, str, str], Kind] = {  # redistributions of inputs and outputs that have a style of their own
    ("input", "R", "P"): "copy",
    ("input", FEATURES, "P"): "gather_input",
    ("input", "R", FEATURES): "split_input",
    ("output", FEATURES, "R"): "gather",
}
KINDS = ("column", "row", *SHORT, "embedding", "replicated", "split0", "split1", *_OTHERS)


class PlanKind(NamedTuple):
    """A parsed kind of a plan.

    Attributes:
        name: Its strategy.
        given: Placement of the input that the module gets.
        made: Placement of the output that the module returns.
        strategy: How the module is changed.
        steps: Kinds of parallel styles, in the order of application.
    """

    name: str
    given: str
    made: str
    strategy: Strategy
    steps: tuple[Kind, ...]


@cache
def kind_of(text: str) -> PlanKind | None:
    """Parse the text of a kind; None if it is no kind."""
    if text in _OTHERS:
        of, step = _OTHERS[text]
        return PlanKind(text, FEATURES, FEATURES, Strategy(of, FEATURES, FEATURES, FEATURES, FEATURES), (step,))
    name, *words = SHORT.get(text, text).split(" ")
    strategy = strategy_of(name)
    ends = dict(zip(words[::2], words[1::2], strict=False))
    if strategy is None or len(words) != 2 * len(ends) or not ends.keys() <= {"from", "to"}:
        return None
    if not all(map(_PLACEMENT.fullmatch, ends.values())):
        return None
    given, made = ends.get("from", strategy.needs), ends.get("to", strategy.usual)
    return PlanKind(name, given, made, strategy, tuple(_steps(name, strategy, given, made)))


def strategy_of(name: str) -> Strategy | None:
    """Return the strategy with a name; None if there is none."""
    if split := _SPLIT.fullmatch(name):
        along = f"S{split[1]}"
        return Strategy(nn.Module, along, along, along, along)
    return _STRATEGIES.get(name)


def kind_text(name: str, given: str, made: str) -> str:
    """Return the shortest text of a kind.

    Args:
        name: Its strategy.
        given: Placement of the input that the module gets.
        made: Placement of the output that the module returns.
    """
    strategy = strategy_of(name)
    assert strategy is not None
    text = name + (f" from {given}" if given != strategy.needs else "")
    text += f" to {made}" if made != strategy.usual else ""
    return next((short for short, whole in SHORT.items() if whole == text), text)


def _steps(name: str, strategy: Strategy, given: str, made: str) -> list[Kind]:
    """Return the parallel styles of a kind, in the order of application."""
    steps: list[Kind] = []
    entered = PlacedStep("input", given, strategy.needs, strategy.gradient)
    enters = given != strategy.needs or strategy.gradient == "P"
    if name in ("row", "embedding"):
        known: Kind = "row" if name == "row" else "vocab"
        steps.append(known if made == "R" else PlacedStep("row" if name == "row" else "vocab", "P", made, made))
    elif name == "column":
        steps.append("column")
    if enters:
        after = strategy.needs if strategy.gradient != "P" else "P"
        steps.append(_KNOWN.get(("input", given, after), entered))
    if name.startswith("split"):
        steps.append(PlacedStep("split", strategy.needs, strategy.gives, strategy.gives))
    if strategy.gives not in ("P", made):
        steps.append(_KNOWN.get(("output", strategy.gives, made), PlacedStep("output", strategy.gives, made, made)))
    return steps
