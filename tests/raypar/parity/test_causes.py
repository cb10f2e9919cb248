"""Likely causes of wrong tensors: each explanation on a tensor that is wrong in its way."""

from __future__ import annotations

import pytest
import torch

from raypar.parity.case import Case, Piece
from raypar.parity.causes import cause_of
from raypar.parity.compare import are_alike, relative_error, scales_of

X = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1))
BIAS = torch.arange(1.0, 7.0)
SIZES = {"pp": 1, "dp": 3, "cp": 1, "tp": 2, "microbatches": 4}


def case(ours, wanted=None, backward=False, axis="tp", vectors=(), sizes=SIZES):
    """Of one axis: what its members have, and should have (None: all of it each)."""
    wanted = [X] * len(ours) if wanted is None else wanted
    at = {"dp": 0, "tp": 0}
    pieces = [Piece(f"{axis}={i}", at | {axis: i}, o, w) for i, (o, w) in enumerate(zip(ours, wanted, strict=True))]
    return Case(pieces, sizes, backward, dict(vectors))


@pytest.mark.parametrize(
    ("r", "backward", "says"),
    [
        (2, False, "tp times the right one: summed over tp once too often"),
        (2, True, "tp times the right one: equal on all of tp, and yet summed over tp: reduced twice"),
        (0.5, False, "1/tp times the right one: an all_reduce over tp is missing (Megatron's g)"),
        (0.5, True, "1/tp times the right one: an all_reduce over tp is missing (Megatron's f)"),
        (3, True, "dp times the right one: summed over dp, and not averaged"),
        (1 / 3, True, "1/dp times the right one: not reduced over dp, or averaged over it twice"),
        (3, False, "3 times the right one: a factor is missing, or one too many"),
        (4, True, "microbatches times the right one: summed over microbatches, and not averaged"),
        (0.25, True, "1/microbatches times the right one: averaged over microbatches twice"),
        (-1, True, "the sign is wrong"),
        (0.9, False, "0.9 times the right one: a factor is missing, or one too many"),
        (
            1 + 3e-5,
            False,
            "almost right: another precision, another eps, or another order of additions",
        ),
        (0, True, "0 everywhere: detached, or masked"),
    ],
)
def test_a_multiple(r, backward, says):
    assert cause_of(case([r * X, r * X], backward=backward)) == says


def test_factors_that_are_equal_are_all_told():
    says = cause_of(case([2 * X, 2 * X], backward=True, sizes=SIZES | {"dp": 2, "cp": 2}))
    assert [one.split(" ")[0] for one in says.split("; or ")] == ["tp", "cp", "dp"]


@pytest.mark.parametrize(
    ("axis", "backward", "says"),
    [
        ("tp", False, "an all_reduce over tp is missing (Megatron's g)"),
        ("tp", True, "an all_reduce over tp is missing (Megatron's f)"),
        ("dp", True, "not reduced over dp, or averaged over it twice"),
        ("dp", False, "not summed over dp"),
    ],
)
def test_parts_of_a_sum(axis, backward, says):
    found = cause_of(case([0.3 * X + Y, 0.7 * X - Y], backward=backward, axis=axis))
    assert found == f"each member of {axis} has its own part of a sum: {says}"


def test_parts_of_the_sums_of_two_halves():
    """As of heads of keys and values that some members share."""
    left, right = X.chunk(2, 1)
    ours = [0.3 * left + 1, 0.7 * left - 1, 0.3 * right + 1, 0.7 * right - 1]
    assert cause_of(case(ours, [left, left, right, right])).startswith("each member of tp has its own part of a sum")


def test_members_that_should_have_the_same():
    """A residual stream beside the parts: their sum is not the right one."""
    says = cause_of(case([X + Y, X - 2 * Y]))
    assert says == "the members of tp should have the same, and do not: an all_reduce over tp is missing (Megatron's g)"


def test_another_members_part():
    left, right = X.chunk(2, 1)
    assert (
        cause_of(case([right, left], [left, right]))
        == "tp=0 has the part of tp=1: a gather or scatter in the wrong order"
    )


def test_parts_in_another_order():
    says = cause_of(case([X.roll(4, 1)] * 2))
    assert says == "the 2 parts of dim 1 are in the order 1, 0: a gather in the wrong order"
    four = torch.cat([X.chunk(4, 1)[i] for i in (0, 2, 1, 3)], 1)
    says = cause_of(case([four] * 2, sizes=SIZES | {"cp": 2}))
    assert says == "the 4 parts of dim 1 are in the order 0, 2, 1, 3: a gather in the wrong order"


def test_one_member_alone():
    assert cause_of(case([X, X + Y])) == "right on tp=0, wrong on tp=1: look at what only these do"


@pytest.mark.parametrize("times", [2, 4])
def test_a_bias_that_is_added_more_than_once(times):
    vectors = {"a.weight": torch.arange(6.0, 0.0, -1), "a.bias": BIAS, "b.bias": torch.zeros(6), "c": torch.ones(3)}
    assert cause_of(case([X + (times - 1) * BIAS] * 2, vectors=vectors)) == f"a.bias is added {times} times"


def test_what_has_another_form():
    assert "tp=1: no gradient arrives here: the graph is cut" in cause_of(case([X, None], backward=True))
    assert cause_of(case([X, None])) == "tp=1: it made no such output"
    assert cause_of(case([X, X[:, :4]])).startswith("tp=1 has shape [2, 4, 6], and should have [2, 8, 6]")
    assert cause_of(case([X, X / 0])) == "not finite on tp=1: an overflow, or a division by 0"


def test_what_nobody_knows():
    assert cause_of(case([X + Y] * 2)).startswith("not a multiple of the right one")
    alone = Case([Piece("server 0 of pp=0", {}, X + Y, X)], SIZES, True, {})
    assert cause_of(alone).startswith("not a multiple")


def test_errors_are_relative():
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]), 50.0) == pytest.approx(0.01)
    assert relative_error(torch.empty(0), torch.ones(2)) == float("inf")
    assert are_alike([X, Y], [X, Y * (1 + 1e-4)], 1e-4)
    assert not are_alike([X, Y], [X, Y * (1 + 1e-3)], 1e-4)


def test_noise_is_judged_against_its_layer():
    gradients = {"a.1.k": torch.tensor([3e-8]), "a.1.w": torch.tensor([3.0, 4.0]), "a.10.k": torch.tensor([3e-8])}
    scales = scales_of(gradients, ["a.1", "a.10"])
    assert scales == pytest.approx({"a.1.k": 5.0, "a.1.w": 5.0, "a.10.k": 3e-8})
