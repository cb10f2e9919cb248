"""The sum of floats is that of plain additions one after the other, on every Python."""

from raypar.schedules.float_sum import float_sum


def test_each_addition_is_rounded():
    assert float_sum([0.1] * 10) == 0.9999999999999999, "the built-in sum gives 1.0 since Python 3.12"
    assert float_sum([1.0, 1e100, 1.0, -1e100]) == 0.0


def test_integers_stay_integers_and_nothing_is_0():
    assert repr(float_sum([1, 2])) == "3"
    assert repr(float_sum(())) == "0"
