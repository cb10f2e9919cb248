"""What a failure costs, in seconds."""

from __future__ import annotations

import time

from raypar.reporting.run_folder.failure_line import effective_share
from raypar.reporting.step_times import StepTimes


def test_steps_that_are_taken_again_are_lost_once():
    times = StepTimes()
    for step in range(4):
        times.keep(step, 10.0 * (step + 1))
    now = time.perf_counter()
    assert 5.0 <= times.lost(now - 5.0, 4) < 6.0
    assert 75.0 <= times.lost(now - 5.0, 2) < 76.0
    times.go_back(2)
    times.keep(2, 1.0)
    assert 6.0 <= times.lost(now - 5.0, 2) < 7.0


def test_the_share_of_effective_time():
    assert effective_share(3.0, [0.5, 0.5]) == 0.75
    assert effective_share(0.0, []) == 1.0
