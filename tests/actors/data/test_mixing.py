"""Data sets that are mixed by weights."""

from __future__ import annotations

import math

import numpy as np
import pytest

from raypar.actors.data.examples.mixing import LARGEST, mixed, shares_of


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((3.0,), [1]),
        ((0.7, 0.3), [7, 3]),
        ((1, 1, 1), [1, 1, 1]),
        ((2, 1, 5), [2, 1, 5]),
        ((0.123, 0.877), [8, 57]),
        ((1, LARGEST - 1), [1, 9990]),
        ((1, 10_007.5), [1, 9998]),  # 9,998 samples would be 0.1001 % off
        ((1, 10_010), [1, 9999]),  # 10,001 would do
    ],
)
def test_the_smallest_block_has_the_shares_that_are_asked_for(weights, shares):
    assert shares_of(weights).tolist() == shares


def test_where_no_block_is_near_the_largest_fractions_get_what_is_left():
    """Hamilton's method: whole samples first, then one more for each of the largest fractions."""
    weights = [LARGEST, 1.4, 3.5, 3.3, 1.8, 2.5, 2.3]
    wanted = [weight / sum(weights) * LARGEST for weight in weights]
    whole = [math.floor(one) for one in wanted]
    left = sorted(range(7), key=lambda which: whole[which] - wanted[which])[: LARGEST - sum(whole)]
    assert shares_of(weights).tolist() == [count + (which in left) for which, count in enumerate(whole)]


def test_shares_are_near_any_weights():
    draws = np.random.default_rng(0)
    for _ in range(50):
        weights = draws.random(int(draws.integers(1, 12))) + 0.01
        shares = shares_of(weights.tolist())
        assert shares.min() >= 1 and shares.sum() <= LARGEST
        assert abs(shares / shares.sum() - weights / weights.sum()).max() <= 1e-3


def test_every_sample_of_every_data_set_comes_once_in_order_whatever_is_asked_first():
    shares = shares_of((0.5, 0.3, 0.2))
    part, number = mixed(np.arange(1000), shares, seed=5)
    for which, share in enumerate(shares.tolist()):
        assert number[part == which].tolist() == list(range(share * 100))
    assert len({tuple(part[at : at + 10].tolist()) for at in range(0, 1000, 10)}) > 50, (
        "blocks are in an order of their own"
    )
    asked = np.array([999, 3, 500])
    again = mixed(asked, shares, seed=5)
    assert (again[0].tolist(), again[1].tolist()) == (part[asked].tolist(), number[asked].tolist())
    assert mixed(np.arange(1000), shares, seed=6)[0].tolist() != part.tolist()
