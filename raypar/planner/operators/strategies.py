"""The strategies that an operator may have, each with its price: column, row, replicated, split by samples or tokens.

Source: Zheng et al. 2022, "Alpa", section 4.1, and MindSpore's auto-parallel modes: an operator has strategies, and
between two of them is a redistribution.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

from raypar.actors.collective.routes import Placement
from raypar.actors.models.own.plan_kinds import PASSING, Strategy, kind_text, strategy_of
from raypar.actors.models.placed_step import FEATURES
from raypar.planner.operators.operator import Operator
from raypar.planner.operators.prices import Prices


class OperatorStrategy(NamedTuple):
    """A strategy of an operator.

    Attributes:
        text: Its kind in a plan; "" if the plan does not name it.
        made: Placement of what it makes.
        cost: Femtoseconds of a microbatch: computing, and what is sent before it and after it. They are whole
            numbers, so that sums do not depend on the order.
        held: Elements of its parameters that an actor has, at the most.
        sent: Bytes of a microbatch that an actor sends for it.
        words: How many redistributions it names.
    """

    text: str
    made: Placement
    cost: int
    held: int
    sent: int
    words: int


def choices(one: Operator, given: Placement, prices: Prices) -> Iterator[OperatorStrategy]:
    """Yield the strategies of an operator whose input has a placement.

    Args:
        one: The operator.
        given: The placement.
        prices: The costs of computing and messages.
    """
    if one.given not in ("", given):
        return
    if one.strategy in PASSING:
        if given == FEATURES and one.goes in ("", FEATURES):
            yield OperatorStrategy(one.strategy, FEATURES, _whole(prices.compute(one, one.strategy)), one.weights, 0, 0)
        return
    if not one.strategy and one.kind in ("activation", "dropout", "view"):
        yield from _passing(one, given, prices)
    for name in _strategies(one):
        strategy = strategy_of(name)
        assert strategy is not None
        for made in dict.fromkeys(_ends(one, strategy)):
            if _fits(one, name, strategy, given, made, prices.ranks):
                yield _priced(one, name, strategy, given, made, prices)


def _strategies(one: Operator) -> tuple[str, ...]:
    """Return the names of the strategies that an operator may have."""
    if one.strategy:
        return (one.strategy,)
    split = tuple(f"split{dim}" for dim in one.splits)
    match one.kind:
        case "linear":
            return ("column", "row", *split, "replicated")
        case "embedding":
            return ("embedding", *split, "replicated")
        case "norm" | "samples":
            return (*split, "replicated")
        case _:
            return ("replicated",)


def _passing(one: Operator, given: Placement, prices: Prices) -> Iterator[OperatorStrategy]:
    """Yield the strategy of an activation function, a dropout or a view whose input is divided: so is its output."""
    if given == "R" or not _divides(one.made, given, prices.ranks) or (one.kind == "view" and given != "S0"):
        return
    text = "" if one.kind != "dropout" else "dropout" if given == FEATURES else f"split{given[1:]}"
    if not (text and one.rigid):
        yield OperatorStrategy(text, given, _whole(prices.compute(one, "column")), 0, 0, 0)


def _ends(one: Operator, strategy: Strategy) -> Iterator[Placement]:
    """Yield the placements that the output of a strategy may get."""
    if one.goes:
        yield one.goes
        return
    if strategy.gives == "P":
        yield from ("R", FEATURES, *(f"S{dim}" for dim in range(len(one.made) - 1)))
        return
    yield strategy.gives
    yield "R"


def _fits(one: Operator, name: str, strategy: Strategy, given: Placement, made: Placement, ranks: int) -> bool:
    """Return whether all parts are equal, as far as they must be, and nothing rigid is redistributed."""
    stays_in = given == strategy.needs
    stays_out = made == strategy.gives or (strategy.gives, made) == ("P", "R")
    if one.rigid and (name, given, made) != ("replicated", "R", "R"):
        return False
    uneven = bool(one.strategy) and name in ("column", "row", "embedding")  # as the user has annotated
    ins = [given] if uneven and stays_in and given == FEATURES else []
    outs = [made] if uneven and stays_out and made == FEATURES else []
    taken = [placement for placement in (given, strategy.needs) if placement not in ins]
    given_out = [placement for placement in (strategy.gives, made) if placement not in (*outs, "P")]
    divided = name == "row" and not uneven
    return (
        all(_divides(one.taken, placement, ranks, ids=one.kind == "embedding") for placement in taken)
        and all(_divides(one.made, placement, ranks) for placement in given_out)
        and (not divided or one.taken[-1] % ranks == 0)
    )


def _divides(shape: tuple[int, ...], placement: Placement, ranks: int, *, ids: bool = False) -> bool:
    """Return whether a tensor has equal parts at a placement. The last dim is split as features alone, or as ids."""
    if placement == "R":
        return True
    dim = len(shape) - 1 if placement == FEATURES else int(placement[1:])
    last = len(shape) if ids or placement == FEATURES else len(shape) - 1
    return dim < last and shape[dim] % ranks == 0


def _priced(
    one: Operator, name: str, strategy: Strategy, given: Placement, made: Placement, prices: Prices
) -> OperatorStrategy:
    """Return a strategy with its price."""
    sent = prices.sums(one, name, made)
    ids = one.kind == "embedding"
    if given != strategy.needs or strategy.gradient == "P":
        ends = given, strategy.needs, strategy.gradient
        sent = sent.plus(prices.moved(one.taken, *ends, learns=one.learns, ids=ids))
    if made != strategy.gives:
        sent = sent.plus(prices.moved(one.made, strategy.gives, made, made, learns=True))
    text = kind_text(name, given, made)
    words = (given != strategy.needs) + (made != strategy.usual)
    named = bool(one.strategy) or name != "replicated" or words or (one.weights and one.kind != "whole")
    cost, held = _whole(prices.compute(one, name) + sent.seconds), ceil(prices.held(one, name))
    return OperatorStrategy(text if named and not one.rigid else "", made, cost, held, round(sent.bytes), words)


def _whole(seconds: float) -> int:
    return round(seconds * 1e15)
