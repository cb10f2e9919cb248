"""The division of a user's modules over tensor ranks: the plan that a search finds, and a table of its costs.

Why no division satisfies the user's annotations, with the fix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from raypar.planner.operators.chains import SearchableChain, Way, cheapest_strategies
from raypar.planner.operators.operator import Aim, Chain, Operator
from raypar.planner.operators.prices import Prices
from raypar.planner.operators.strategies import OperatorStrategy
from raypar.schedules.float_sum import float_sum
from raypar.schedules.formatting import text_table, three_digit_seconds

_HEAD = ("module", "input", "output", "strategy", "weights", "sent", "time")
_SHOWN = 60  # modules in a table


def annotation_faults(chain: Chain, ranks: int) -> Iterator[str]:
    """Yield the modules of a chain whose annotation splits along a dim that they lack or that has no equal parts.

    Args:
        chain: The operators.
        ranks: Number of tensor-parallel ranks.
    """
    for one in chain:
        yield from _placement_faults(one, "from", one.given, one.taken, ranks)
        yield from _placement_faults(one, "to", one.goes, one.made, ranks)
        if not one.strategy.startswith("split") or not one.taken:
            continue
        dim = int(one.strategy.removeprefix("split"))
        dims = len(one.taken) - (one.kind != "embedding")  # ids have no features
        if dim >= dims:
            fix = " or ".join(f"'split{other}'" for other in range(dims)) or "'replicated'"
            what = f"but of its input, {'x'.join(map(str, one.taken))}, that dim is none of samples or tokens"
            yield f"model.plan: {one.name} is {one.strategy!r}, {what}: use {fix}"
        elif one.taken[dim] % ranks:
            yield _unequal(one, f"{one.taken[dim]} along dim {dim} of the input", one.taken[dim], ranks)


def _placement_faults(one: Operator, word: str, placement: str, shape: Sequence[int], ranks: int) -> Iterator[str]:
    """Yield a fault if a tensor is annotated to be split along a dim that it lacks, or that has no equal parts."""
    if not placement.startswith("S"):
        return
    dim, sizes = int(placement.removeprefix("S")), "x".join(map(str, shape))
    if not -1 <= dim < len(shape):
        fix = ", ".join(f"S{other}" for other in range(len(shape)))
        text = f"model.plan: {one.name} is given as '{word} {placement}', but of {sizes} there is no dim {dim}"
        yield f"{text}: use R, S-1 or {fix}"
    elif shape[dim] % ranks:
        what = "input" if word == "from" else "output"
        yield _unequal(one, f"{shape[dim]} along dim {dim} of the {what}", shape[dim], ranks)


def way_fault(chain: Chain, name: str, ranks: int) -> str:
    """Say why no division leads to an operator.

    Args:
        chain: The operators.
        name: Name of the first one that can't be reached.
        ranks: Number of tensor-parallel ranks.
    """
    end = next(position for position, one in enumerate(chain) if one.name == name)
    asked = [one for one in chain[: end + 1] if one.strategy][-1]
    outputs, inputs = asked.made[-1], asked.taken[-1]
    if asked.strategy == "column" and outputs % ranks:
        return _unequal(asked, f"{outputs} outputs", outputs, ranks)
    if asked.strategy == "row" and inputs % ranks:
        return _unequal(asked, f"{inputs} inputs", inputs, ranks)
    reached = "" if asked.name == name else f", and from there to {name}"
    fix = f"leave out ' from' and ' to' of it and of its neighbours, or give sizes that mesh.tp {ranks} divides"
    return f"model.plan: no division leads to what it says of {asked.name}{reached}: {fix}"


def _unequal(one: Operator, what: str, size: int, ranks: int) -> str:
    low = size // ranks * ranks
    sizes = f"{low} or {low + ranks}" if low else str(ranks)
    fix = f"use {sizes}, or leave it out of the plan"
    return f"mesh.tp {ranks} does not divide the {what} of {one.name}, which the plan divides: {fix}"


@dataclass(frozen=True)
class Division:
    """The strategies of all modules.

    Attributes:
        plan: A kind for each module that is named.
        modules: The modules that were searched, each with its choice.
        annotated: Names of the modules whose kinds the user gave.
        whole: Seconds of a microbatch in these modules if every actor computes all of them.
    """

    plan: Mapping[str, str]
    modules: Sequence[tuple[Operator, OperatorStrategy]]
    annotated: frozenset[str]
    whole: float

    @property
    def seconds(self) -> float:
        """Seconds of a microbatch in the modules that were searched, on paper."""
        return sum(choice.cost for _, choice in self.modules) * 1e-15

    @property
    def sent(self) -> int:
        """Bytes of a microbatch that an actor sends for these modules."""
        return sum(choice.sent for _, choice in self.modules)

    @property
    def held(self) -> int:
        """Elements of the modules' parameters that an actor has."""
        return sum(choice.held for _, choice in self.modules)

    def lines(self) -> Iterator[str]:
        """Yield a table of the modules that have weights or are named, and what they take together."""
        shown = [(one, choice) for one, choice in self.modules if one.weights or choice.text]
        rows = [_HEAD, *(self._cells(one, choice) for one, choice in shown[:_SHOWN])]
        yield from text_table(rows)
        if len(shown) > _SHOWN:
            yield f"... and {len(shown) - _SHOWN} more modules"
        weights = sum(one.weights for one, _ in self.modules)
        yield f"an actor has {self.held:,} of the {weights:,} weights of these modules, and sends {self.sent:,} bytes"
        here, whole = three_digit_seconds(self.seconds), three_digit_seconds(self.whole)
        yield f"in a microbatch, which takes on paper {here} in them, and {whole} if each actor computes all"

    def _cells(self, one: Operator, choice: OperatorStrategy) -> tuple[str, ...]:
        mark = " *" if one.name in self.annotated else ""
        shapes = ("x".join(map(str, shape)) for shape in (one.taken, one.made))
        what = choice.text or "replicated"
        return (
            one.name,
            *shapes,
            what + mark,
            f"{choice.held:,}",
            f"{choice.sent:,}",
            three_digit_seconds(choice.cost * 1e-15),
        )


def search_plan(found: SearchableChain, prices: Prices, aim: Aim) -> Division | list[str]:
    """Search the strategies of all chains.

    Args:
        found: The chains, and the annotated modules outside of them.
        prices: The costs of computing and messages.
        aim: What is minimised first.

    Returns:
        The division, or the faults of the annotations.
    """
    plan, modules, faults = dict(found.kept), list[tuple[Operator, OperatorStrategy]](), list[str]()
    for chain in found.chains:
        if misfits := [*annotation_faults(chain, prices.ranks)]:
            faults += misfits
            continue
        way = cheapest_strategies(chain, prices, aim)
        if not isinstance(way, Way):
            faults.append(way_fault(chain, way, prices.ranks))
            continue
        modules += zip(chain, way.choices, strict=True)
        plan |= {one.name: choice.text for one, choice in zip(chain, way.choices, strict=True) if choice.text}
    if faults:
        return faults
    modules.sort(key=lambda pair: found.order[pair[0].name])
    annotated = frozenset({*found.kept, *(one.name for one, _ in modules if one.strategy)})
    return Division(plan, modules, annotated, float_sum(prices.compute(one, "replicated") for one, _ in modules))
