"""Batches whose shapes change between microbatches and steps, as in a curriculum of sequence lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import GPT
from raypar.actors.specs.optim import SGD
from raypar.actors.specs.run import Run
from tests.support.replicas import agrees
from tests.support.team import Team

TINY = GPT(layers=4, hidden=16, heads=4, seq=16, vocab=11, dropout=0.0)


def curriculum(step, microbatch, dp):
    """Sequences grow from step to step, and every other microbatch has fewer samples, and longer ones."""
    odd = (microbatch + dp) % 2
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + dp)
    ids = torch.randint(11, (3 - odd, 5 + 2 * step + 4 * odd), generator=generator)
    return ids[:, :-1], ids[:, 1:]


RUN = Run(
    model=TINY,
    mesh=Mesh(pp=2),
    microbatches=4,
    data=Batches(curriculum, curriculum, varying=True),
    optim=SGD(lr=0.1),
    steps=3,
    timeout=10.0,
)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "1f1b"},
        {"schedule": "zb-v", "mesh": Mesh(pp=2, dp=2)},
        {"schedule": "interleaved", "mesh": Mesh(pp=2, tp=2), "recompute": "full"},
    ],
    ids=lambda changes: changes["schedule"],
)
def test_a_curriculum_trains_as_in_one_process(changes):
    agrees(Team.of(replace(RUN, **changes)), 1e-5)


def test_an_evaluation_has_shapes_of_its_own():
    teams, losses = (Team.of(RUN), Team.of(replace(RUN, mesh=Mesh()))), []
    for team in teams:
        team.step(0)
        losses.append([result.losses for result in team.step(1, "evaluate") if result.losses])
    assert losses[0] == losses[1]
