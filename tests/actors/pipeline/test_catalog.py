"""Every schedule of the catalog on workers: the bits of one process, and as many activations as the schedule says."""

from __future__ import annotations

import pytest

from raypar.actors.mesh.mesh import Mesh
from raypar.schedules.rules import most_in_flight
from tests.support.replicas import agrees
from tests.support.schedules import SYNCHRONOUS
from tests.support.team import Team, linears

SIZES = {  # ranks and microbatches
    "whole": [(1, 2), (2, 8), (4, 3)],
    "auto": [(2, 1), (3, 2), (4, 5)],
    "split": [(2, 3), (3, 7), (4, 8)],
}


def one(name, ranks, microbatches, **changes):
    """Train a small model by a schedule, and compare it with one plain process and with the schedule."""
    is_twice = name == "dualpipe"  # two replicas of each stage sum their gradients
    if is_twice:
        microbatches *= 2
        changes["mesh"] = Mesh(pp=ranks, rank_dp=(2,) * ranks)
    team = Team(linears(8), ranks, microbatches, name, steps=1, **changes)
    agrees(team, bound=1e-6 if is_twice else 0.0)
    assert [result.in_flight for result in team.step(1)] == list(most_in_flight(team.programs["train"]))


@pytest.mark.each_value
@pytest.mark.parametrize("backward", ["whole", "auto", "split"])
@pytest.mark.parametrize("name", SYNCHRONOUS)  # asynchronous schedules have other bits: test_stream.py
def test_a_schedule_has_the_bits_of_one_process(name, backward):
    for ranks, microbatches in SIZES[backward]:
        one(name, ranks, microbatches, backward=backward)
