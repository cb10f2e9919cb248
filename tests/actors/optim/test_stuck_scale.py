"""A stuck loss scale is told from a healthy one, which overflows about once a window."""

import pytest

from raypar.actors.optim.stuck_scale import WINDOWS, stuck_scale


def healthy(steps, window, limit=2.0**12):
    """A dynamic scale whose steps overflow above a limit."""
    scale, clean = limit / 4, 0
    for _ in range(steps):
        skipped = scale > limit
        yield scale, skipped
        clean = 0 if skipped else clean + 1
        if skipped:
            scale /= 2
        elif clean == window:
            scale, clean = 2 * scale, 0


@pytest.mark.parametrize("window", [5, 50])
def test_a_healthy_scale_is_not_stuck(window):
    history = list(healthy(40 * window, window))
    assert sum(skipped for _, skipped in history) > 10
    assert not any(stuck_scale(history[:end], 1.0, window) for end in range(0, len(history), 7))


def test_a_scale_at_its_floor_is():
    history = [(64.0, True), *[(1.0, False)] * (5 * WINDOWS)]
    assert "at its floor, 1, for 15 steps: lower the learning rate" in stuck_scale(history, 1.0, 5)
    assert stuck_scale(history[:-1], 1.0, 5) is None


def test_a_scale_that_only_falls_is():
    history = [(2.0 ** (40 - step // 2), step % 2 == 1) for step in range(5 * WINDOWS)]
    told = stuck_scale(history, 1.0, 5)
    assert "each of the last 3 windows of 5 steps overflowed (7 steps skipped)" in told
    assert "larger eps" in told
