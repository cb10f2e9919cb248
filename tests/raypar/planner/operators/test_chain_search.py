"""The search over a chain of operators finds what trying all strategies finds."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.actors.models.own.plan_kinds import kind_of, strategy_of
from raypar.planner.hardware.cluster import RingRoute
from raypar.planner.operators.chains import cheapest_strategies
from raypar.planner.operators.operator import Operator
from raypar.planner.operators.prices import Prices
from raypar.planner.timing.roofline import Roofline

PLACES = ("R", "S-1", "S0", "S1")
NAMES = {
    "linear": ("column", "row", "split0", "split1", "replicated"),
    "norm": ("split0", "split1", "replicated"),
    "activation": ("replicated",),
}


def prices(bandwidth=1e9, latency=0.0, ranks=2):
    return Prices(ranks, Roofline(1e9, 1e9, 0.0), RingRoute(bandwidth, latency), 4, 1)


def linear(name, inputs, outputs, rows=(4, 6), **changes):
    weights = inputs * outputs + outputs
    one = Operator(name, "linear", (*rows, inputs), (*rows, outputs), weights, outputs, (0, 1))
    return one._replace(**changes)


def flat(name, kind, width, rows=(4, 6)):
    shape = (*rows, width)
    return Operator(name, kind, shape, shape, 2 * width if kind == "norm" else 0, 0, (0, 1) if kind == "norm" else ())


def equal(one, place, shape, ranks):
    return place == "R" or shape[-1 if place == "S-1" else int(place[1:])] % ranks == 0


def tried(chain, costs):
    """The least price of a chain, over all strategies of each operator and all placements between operators."""
    best = None
    for names in product(*(NAMES[one.kind] for one in chain)):
        for ends in product(PLACES, repeat=len(chain) - 1):
            price = priced(chain, names, ("R", *ends, "R"), costs)
            best = price if best is None or (price is not None and price < best) else best
    return best


def priced(chain, names, ends, costs):
    """Femtoseconds of a chain whose operators have these strategies, and these placements at their ends."""
    total = 0
    for one, name, given_, made in zip(chain, names, ends, ends[1:], strict=False):
        if not all(equal(one, place, shape, costs.ranks) for place, shape in ((given_, one.taken), (made, one.made))):
            return None
        strategy = strategy_of(name)
        if one.kind == "activation" and given_ == made != "R":  # it takes a part and makes one
            total += round(costs.compute(one, "column") * 1e15)
            continue
        ends_out = {strategy.gives, "R"} if strategy.gives != "P" else {"R", "S-1", "S0", "S1"}
        if made not in ends_out or (name == "row" and one.taken[-1] % costs.ranks):
            return None
        if name == "column" and one.made[-1] % costs.ranks:
            return None
        if name.startswith("split") and one.taken[int(name[-1])] % costs.ranks:
            return None
        seconds = costs.compute(one, name) + costs.sums(one, name, made).seconds
        seconds += costs.moved(one.taken, given_, strategy.needs, strategy.gradient, learns=one.learns).seconds
        if made != strategy.gives:
            seconds += costs.moved(one.made, strategy.gives, made, made, learns=True).seconds
        total += round(seconds * 1e15)
    return total


def drawn(draw):
    width, chain = draw(st.sampled_from((3, 4, 8))), []
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(("linear", "linear", "norm", "activation")))
        if kind == "linear":
            after = draw(st.sampled_from((3, 4, 8, 32)))
            chain.append(linear(f"layers.{number}", width, after, learns=number > 0))
            width = after
        else:
            chain.append(flat(f"layers.{number}", kind, width))
    return tuple(chain)


@pytest.mark.long
@given(st.data(), st.sampled_from((1e6, 1e8, 1e9, 1e11)), st.sampled_from((0.0, 1e-6)), st.sampled_from((2, 3)))
def test_no_strategies_are_cheaper(data, bandwidth, latency, ranks):
    chain, costs = drawn(data.draw), prices(bandwidth, latency, ranks)
    way = cheapest_strategies(chain, costs, "speed")
    assert way.price[0] == tried(chain, costs) == sum(choice.cost for choice in way.choices)


def texts(chain, costs, aim="speed"):
    return [choice.text for choice in cheapest_strategies(chain, costs, aim).choices]


def test_a_wide_mlp_is_a_column_and_a_row():
    """Megatron's, where products take longest; where messages do, every actor computes its samples, and sums weights
    once a step; where those take long too, all compute all."""
    chain = (linear("layers.0", 64, 256), flat("layers.1", "activation", 256), linear("layers.2", 256, 64))
    assert texts(chain, prices(bandwidth=1e10)) == ["column", "", "row"]
    assert texts(chain, prices(bandwidth=1e3)) == ["replicated", "", "replicated"]
    many = tuple(one._replace(taken=(512, *one.taken[1:]), made=(512, *one.made[1:])) for one in chain)
    assert texts(many, prices(bandwidth=1e8)) == ["split0 from R", "", "split0 to R"]


def test_memory_first_divides_all_that_it_can():
    chain = (linear("layers.0", 64, 256), flat("layers.1", "norm", 256), linear("layers.2", 256, 3))
    assert texts(chain, prices(bandwidth=1e3), "memory")[0].startswith("column")
    assert kind_of(texts(chain, prices(bandwidth=1e3), "memory")[2]).name == "row", "3 outputs are no equal parts"


def test_between_samples_and_features_the_fewest_bytes_are_sent():
    """MindSpore's example: what is divided by samples, and behind it by features. The gather's backward stays a sum."""
    chain = (
        linear("layers.0", 64, 64, strategy="split0", learns=False),
        linear("layers.1", 64, 64, strategy="column"),
        linear("layers.2", 64, 64, strategy="row"),
    )
    assert texts(chain, prices()) == ["split0 from R", "column from S0", "row"]
    costs, shape = prices(), (4, 6, 64)
    sent = 2 * (4 * 6 * 64 * 4) / 2  # half of it each way
    assert costs.moved(shape, "S0", "R", "P", learns=True) == pytest.approx((sent, sent / 1e9))


def test_what_can_not_be_is_named():
    chain = (linear("layers.0", 4, 4, strategy="column", goes="S-1"), linear("layers.1", 4, 4, given="R"))
    assert cheapest_strategies(chain, prices(), "speed") == "layers.1"
