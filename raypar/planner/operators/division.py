"""The division of a user's modules over tensor ranks: the plan that a search finds, and a table of its costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from raypar.planner.operators.chains import SearchableChain, Way, cheapest
from raypar.planner.operators.misfits import annotation_faults, way_fault
from raypar.planner.operators.operator import Aim, Operator
from raypar.planner.operators.prices import Prices
from raypar.planner.operators.strategies import OperatorStrategy
from raypar.schedules.float_sum import float_sum
from raypar.schedules.formatting import text_table, three_digit_seconds

_HEAD = ("module", "input", "output", "strategy", "weights", "sent", "time")
_SHOWN = 60  # modules in a table


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


def divided(found: SearchableChain, prices: Prices, aim: Aim) -> Division | list[str]:
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
        way = cheapest(chain, prices, aim)
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
