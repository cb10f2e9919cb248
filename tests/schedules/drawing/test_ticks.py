"""Round numbers: few enough, inside, and evenly spaced."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.schedules.drawing.svg import ticks


@pytest.mark.parametrize(
    ("low", "high", "most", "wanted"),
    [
        (0, 1.5, 4, [0, 0.5, 1, 1.5]),
        (0, 22, 5, [0, 5, 10, 15, 20]),
        (0, 100, 10, [0, 20, 40, 60, 80, 100]),
        (2.41, 5.6, 4, [3, 4, 5]),
        (-3, 3, 3, [-2, 0, 2]),
        (1, 1, 5, []),
        (0, math.inf, 5, []),
        (math.nan, 1, 5, []),
    ],
)
def test_ticks_are_round(low, high, most, wanted):
    assert ticks(low, high, most) == pytest.approx(wanted)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 12))
def test_there_are_some_but_not_too_many(low, span, most):
    found = ticks(low, low + span, most)
    assert len(found) <= most
    assert all(low - 1e-6 * span <= tick <= low + span * (1 + 1e-6) for tick in found)
