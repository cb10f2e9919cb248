"""The cheapest strategies of a chain of operators, by dynamic programming over the placements between them.

What comes after an operator depends only on the placement of what it makes, so for each placement the cheapest way to
it is enough: with k strategies and p placements a chain of n operators takes n k p steps in the place of k^n.

Source: Bellman 1957; as intra-operator search in Jia et al. 2019, "FlexFlow" and Zheng et al. 2022, "Alpa", where an
integer program serves graphs that are no chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raypar.planner.operators.operator import Aim, Operator
from raypar.planner.operators.prices import Prices
from raypar.planner.operators.strategies import OperatorStrategy, choices


class Way(NamedTuple):
    """What a chain does.

    Attributes:
        price: What is made small, first things first.
        choices: By operator.
    """

    price: tuple[int, int, int]
    choices: tuple[OperatorStrategy, ...]


def cheapest(chain: Sequence[Operator], prices: Prices, aim: Aim) -> Way | str:
    """Find the cheapest strategies of a chain, whose first input and last output are whole.

    Args:
        chain: The operators.
        prices: What things cost.
        aim: What is made small: seconds, and then memory; or memory, and then seconds.

    Returns:
        The way; or the name of the first operator that can't be what the user has annotated, behind what is before it.
    """
    ways = {"R": Way((0, 0, 0), ())}
    for number, one in enumerate(chain):
        following: dict[str, Way] = {}
        for given, way in ways.items():
            for choice in choices(one, given, prices):
                price = _more(way.price, choice, aim)
                if number + 1 == len(chain) and choice.made != "R":
                    continue
                if choice.made not in following or price < following[choice.made].price:
                    following[choice.made] = Way(price, (*way.choices, choice))
        if not following:
            return one.name
        ways = following
    return ways["R"]


def _more(price: tuple[int, int, int], choice: OperatorStrategy, aim: Aim) -> tuple[int, int, int]:
    first, second = (choice.cost, choice.held) if aim == "speed" else (choice.held, choice.cost)
    return price[0] + first, price[1] + second, price[2] + choice.words
