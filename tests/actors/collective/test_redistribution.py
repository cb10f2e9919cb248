"""Redistribution: values, gradients (gradcheck), what is sent, and that no sequence of collectives sends less."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypar.actors.collective.redistribution import redistribute
from raypar.actors.collective.routes import route, split_dim
from tests.support.local_groups import local_groups
from tests.support.logical import together
from tests.support.threads import in_threads

SHAPE = (4, 6)
ONE = ("R", "S0", "S1")


def has(state, sizes, at, whole):
    """What a member at some coordinates has of a tensor; of a partial one an equal share."""
    for placement, size, place in zip(state, sizes, at, strict=True):
        if (dim := split_dim(placement)) is not None:
            whole = whole.chunk(size, dim)[place]
        elif placement == "P":
            whole = whole / size
    return whole


def moved(before, after, sizes, whole):
    """By member, what it has after a redistribution, and the elements that all have sent."""
    coordinates = list(product(*map(range, sizes)))
    groups = {}
    for axis, size in enumerate(sizes):
        for at in coordinates:
            if at[axis] == 0:
                members = [(*at[:axis], place, *at[axis + 1 :]) for place in range(size)]
                groups |= {
                    (axis, one): group for one, group in zip(members, local_groups(f"a{axis}", size), strict=True)
                }

    def one(at):
        own = [groups[axis, at] for axis in range(len(sizes))]
        return redistribute(has(before, sizes, at, whole).contiguous(), own, before, after)

    found = in_threads(coordinates, one)
    entries = [entry for group in groups.values() for entry in group.ledger.entries().values()]
    return dict(zip(coordinates, found, strict=True)), sum(entry.bytes for entry in entries) / whole.element_size()


@pytest.mark.sampled
@pytest.mark.parametrize(("before", "after"), [*product(ONE, ONE), ("P", "R"), ("P", "S0"), ("P", "S1")])
def test_values_and_gradients_on_one_axis(before, after):
    """Of partial tensors there is one for each member, which together stack up along a further dim."""
    whole = torch.arange(24.0, dtype=torch.float64).reshape(SHAPE)
    found, sent = moved((before,), (after,), (2,), whole)
    for at, part in found.items():
        torch.testing.assert_close(part, has((after,), (2,), at, whole))
    assert sent == 2 * sum(step.sent for step in route((before,), (after,), SHAPE, (2,)))
    if before != "P":
        ends = [split_dim(before), split_dim(after)]
        inputs = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
        work = lambda group, x: redistribute(x, [group], [before], [after])  # noqa: E731
        assert torch.autograd.gradcheck(lambda x: together(work, 2, (ends[0],), ends[1], x), (inputs,))


def test_the_gradient_of_what_members_use_differently_is_a_sum():
    """Each member's use is a product with its own rows: the backward of the gather is a reduce-scatter."""
    weight = torch.randn(4, 6, dtype=torch.float64)

    def work(group, x, w):
        whole = redistribute(x, [group], ["S1"], ["R"], gradient=["P"])
        return whole @ w.T

    inputs = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True), weight.requires_grad_()
    torch.testing.assert_close(together(work, 2, (1, 0), 1, *inputs), inputs[0] @ weight.T)
    assert torch.autograd.gradcheck(lambda x, w: together(work, 2, (1, 0), 1, x, w), inputs)


def least(before, after, shape, sizes, left):
    """The fewest elements that a member sends, over all sequences of so many collectives: written down once more."""
    if before == after:
        return 0.0
    if not left:
        return float("inf")
    best = float("inf")
    held = 1
    for length in shape:
        held *= length
    for one, size in zip(before, sizes, strict=True):
        held /= size if one[0] == "S" else 1
    for axis, size in enumerate(sizes):
        one = before[axis]
        if one[0] == "S" and one in before[axis + 1 :]:
            continue
        for other in ("R", *(f"S{dim}" for dim in range(len(shape)))):
            if other == one or (other[0] == "S" and other in before[axis + 1 :]):
                continue
            if other[0] == "S":
                ways = size
                for at, placement in enumerate(before):
                    ways *= sizes[at] if placement == other else 1
                if shape[int(other[1])] % ways:
                    continue
            gathers = {"R": {"S": (size - 1) * held, "P": 2 * (size - 1) / size * held}}
            cost = gathers[other][one[0]] if other == "R" else 0.0 if one == "R" else (size - 1) / size * held
            then = (*before[:axis], other, *before[axis + 1 :])
            best = min(best, cost + least(then, after, shape, sizes, left - 1))
    return best


@given(
    before=st.tuples(*[st.sampled_from(("R", "P", "S0", "S1"))] * 2),
    after=st.tuples(*[st.sampled_from(ONE)] * 2),
    sizes=st.sampled_from([(2, 2), (2, 3), (3, 2)]),
)
def test_no_sequence_of_collectives_sends_less_and_the_route_leads_there(before, after, sizes):
    shape = (12, 36)  # which any two axes divide
    whole = torch.arange(12.0 * 36).reshape(shape)
    try:
        steps = route(before, after, shape, sizes)
    except ValueError:
        assert least(before, after, shape, sizes, 4) == float("inf")
        return
    assert sum(step.sent for step in steps) == pytest.approx(least(before, after, shape, sizes, 4))
    found, sent = moved(before, after, sizes, whole)
    for at, part in found.items():
        torch.testing.assert_close(part, has(after, sizes, at, whole))
    assert sent == pytest.approx(sizes[0] * sizes[1] * sum(step.sent for step in steps))


def test_a_split_becomes_another_by_one_all_to_all_and_not_by_way_of_the_whole():
    """S0 -> R -> S1 sends (n - 1) parts a member, S0 -> S1 (n - 1) / n of one."""
    assert [(step.before, step.after, step.sent) for step in route(("S0",), ("S1",), (8, 8), (4,))] == [
        ("S0", "S1", 12.0)
    ]
    through = [*route(("S0",), ("R",), (8, 8), (4,)), *route(("R",), ("S1",), (8, 8), (4,))]
    assert sum(step.sent for step in through) == 48.0
    assert route(("R",), ("S1",), (8, 8), (4,))[0].sent == 0.0
    assert [step.after for step in route(("P",), ("S1",), (8, 8), (4,))] == ["S1"], "a reduce-scatter"


def test_what_can_not_be_is_told():
    with pytest.raises(ValueError, match=r"a tensor \[3, 3\] can't go from R to S0 over \[2\] actors: parts must be"):
        route(("R",), ("S0",), (3, 3), (2,))
    with pytest.raises(ValueError, match="nothing becomes a partial sum"):
        route(("R",), ("P",), (4, 4), (2,))
