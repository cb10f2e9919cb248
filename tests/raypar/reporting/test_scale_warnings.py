"""A loss scale without room is told once, with what to do."""

from __future__ import annotations

from types import SimpleNamespace

from raypar.actors.specs.precision import LossScale
from raypar.reporting.scale_warnings import ScaleWarnings


def told(warnings, step, scale, skipped):
    return warnings.of(SimpleNamespace(steps_taken=step, loss=1.0, loss_scale=scale, skipped=skipped))


def test_it_is_told_once_until_the_scale_has_room_again():
    warnings = ScaleWarnings(LossScale(window=2, floor=1.0))
    said = [told(warnings, step, 2.0 ** (20 - step), True) for step in range(1, 9)]
    assert [bool(one) for one in said] == [False] * 5 + [True, False, False]
    assert "lower the learning rate" in said[5]
    for step in range(9, 15):
        assert told(warnings, step, 2.0 ** (step - 3), False) is None
    said = [told(warnings, step, 2.0, True) for step in range(15, 21)]
    assert any(said)


def test_a_run_without_a_scale_has_nothing_to_tell():
    assert told(ScaleWarnings(LossScale(window=1)), 1, None, False) is None
