"""What follows from a schedule's rows alone agrees with the simulation."""

from __future__ import annotations

import pytest

from raypar.schedules import Costs, build, lower, simulate
from raypar.schedules.passes.split_backward import split_backward
from raypar.schedules.rules import most_in_flight


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved", "forward"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 4), (4, 8), (3, 6)])
def test_activations_in_flight_follow_from_the_rows_alone(name, ranks, microbatches):
    schedule = lower(build(name, ranks, microbatches))
    assert most_in_flight(schedule) == simulate(schedule).in_flight
    if name != "forward":
        split = split_backward(schedule, Costs(), every=True)
        assert most_in_flight(split) == simulate(split).in_flight
