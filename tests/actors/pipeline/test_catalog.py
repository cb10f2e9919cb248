"""Every schedule of the catalog on workers: the bits of one process, and as many activations as the schedule says."""

from __future__ import annotations

import pytest

from raypar.schedules.catalog import CATALOG
from raypar.schedules.rules import most_in_flight
from tests.support.replicas import agrees
from tests.support.team import Team, linears

# Asynchronous schedules have other bits: test_stream.py.
TRAINING = [name for name, entry in CATALOG.items() if not (entry.forward_only or entry.is_stream)]
SIZES = [(1, 2), (2, 1), (2, 3), (2, 8), (3, 2), (3, 7), (4, 3), (4, 5), (4, 8)]  # ranks and microbatches


def one(name, ranks, microbatches, **changes):
    """Train a small model by a schedule, and compare it with one plain process and with the schedule."""
    team = Team(linears(8), ranks, microbatches, name, steps=1, **changes)
    agrees(team, bound=0.0)
    assert [result.in_flight for result in team.step(1)] == list(most_in_flight(team.programs["train"]))


@pytest.mark.parametrize("name", TRAINING)
def test_a_schedule_has_the_bits_of_one_process(name):
    for at, (ranks, microbatches) in enumerate(SIZES):
        one(name, ranks, microbatches, backward=("whole", "auto", "split")[at % 3])
