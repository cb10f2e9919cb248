"""The loss scale alone: its rules, and what it does in a long run."""

from __future__ import annotations

import math
import random

import pytest

from raypar.actors.optim.loss_scale import LossScaler
from raypar.actors.specs.precision import FP16_MAX, LossScale, Precision
from tests.support.team import Team, linears


def test_it_grows_after_a_window_and_falls_at_once():
    scaler = LossScaler(LossScale(init=8.0, window=2, floor=2.0))
    seen = []
    for overflow in (0, 0, 0, 1, 1, 1, 1, 0, 0):
        (scaler.fall if overflow else scaler.grow)()
        seen.append(scaler.scale)
    assert seen == [8, 16, 16, 8, 4, 2, 2, 2, 4]


def test_hysteresis_bears_some_overflows():
    scaler = LossScaler(LossScale(init=8.0, hysteresis=2))
    scaler.fall()
    assert scaler.scale == 8.0
    scaler.grow()
    scaler.fall()
    assert scaler.scale == 4.0


@pytest.mark.parametrize(
    ("init", "overflow", "seen"),
    [
        (4.0, "skip", [4, 4, 8, 8, 16]),
        (2.0**19, "skip", [2**19, 2**19, 2**15, 2**15, 2**16]),
        (2.0**19, "clamp", [2**19, 2**19, 2**15, 2**15, 2**16]),
    ],
)
def test_steps_without_an_overflow_let_it_grow_and_others_let_it_fall(init, overflow, seen):
    scale = LossScale(init=init, window=2, backoff=2.0**-4, overflow=overflow)
    team = Team(linears(), m=2, precision=Precision("fp16"), loss_scale=scale, steps=len(seen))
    found = [team.step(number)[-1] for number in range(len(seen))]
    assert [result.scale for result in found] == seen
    assert [result.is_skipped for result in found] == [
        init > 4 and overflow == "skip" and step == 1 for step in range(5)
    ]


def test_its_numbers_restore_it():
    scaler, other = LossScaler(LossScale(init=8.0, window=3)), LossScaler(LossScale(window=3))
    scaler.grow()
    scaler.grow()
    scaler.skipped, scaler.left_out = 3, 5
    other.load(scaler.numbers())
    assert (other.scale, other.skipped, other.left_out) == (8.0, 3, 5)
    other.grow()
    assert other.scale == 16.0


def test_without_scaling_it_is_1():
    scaler = LossScaler(None)
    scaler.load(LossScaler(LossScale()).numbers())
    scaler.grow()
    scaler.fall()
    assert scaler.scale == 1.0
    assert not scaler.can_fall


def test_a_run_that_begins_to_scale_its_loss_begins_with_its_own_first_scale():
    before, scaler = LossScaler(None), LossScaler(LossScale(init=8.0))
    before.skipped, before.left_out = 3, 5
    scaler.load(before.numbers())
    assert (scaler.scale, scaler.skipped, scaler.left_out) == (8.0, 3, 5)


def long_run(window, addends=1, seed=3, steps=60_000):
    """Overflows a window, and the mean scale in log2. The largest gradient of a step is log-normal."""
    dice, scaler, overflows, total = random.Random(seed), LossScaler(LossScale(window=window)), 0, 0.0
    for _ in range(steps):
        largest = addends * 2.0 ** dice.gauss(-8, 1)
        total += math.log2(scaler.scale)
        if largest * scaler.scale > FP16_MAX:
            overflows += 1
            scaler.fall()
        else:
            scaler.grow()
    return overflows * window / steps, total / steps


@pytest.mark.parametrize("window", [50, 200, 1000])
def test_the_rate_of_overflow_is_about_one_a_window(window):
    rate, _ = long_run(window)
    assert 0.5 <= rate <= 1.0


def test_a_smaller_window_has_the_larger_scale():
    small, middle, large = (long_run(window)[1] for window in (50, 200, 1000))
    assert small > middle > large


def test_sums_in_fp32_allow_a_larger_scale_than_sums_in_fp16():
    """In fp16 the sum of eight addends must fit; in fp32 only each addend, which was made in fp16."""
    assert long_run(200)[1] > long_run(200, addends=8)[1] + 2
