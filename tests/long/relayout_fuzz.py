"""Random pairs of layouts of small models, with threads as actors: does a run go on in the other as in its own?

    python -m tests.long.relayout_fuzz [--number 100] [--seed 0]

After a step in one layout all of the state is in the other, bit for bit, and the loss of the next step is that of the
run that stays. Prints how many were taken of each kind, and the first pair that differs. Exit code 1 if there is one.
"""

from __future__ import annotations

import sys

import torch
from hypothesis import Phase, reject
from hypothesis import strategies as st

from raypar.actors.models.skeleton import Skeleton
from raypar.actors.sharding import Shard
from raypar.config.run import check_run
from raypar.errors import ConfigError
from raypar.job.layout.elastic import Layout
from raypar.job.layout.other_layout import other_layout
from raypar.job.recover.relayout import differences
from raypar.reporting.report import report_of
from tests.support.fuzzing import fuzz
from tests.support.layouts import layouts, own_dice
from tests.support.relayouts import relaid
from tests.support.team import Team

TAKEN = ("mesh", "schedule", "data_parallel", "offload", "offload_folder", "bucket_mb", "zero", "zero_reduce")
TAKEN += ("zero_units", "zero_gather", "zero_resident", "reshard_after_forward", "context", "sequence_parallel")
TAKEN += ("recompute", "backward", "tile", "chunks")


@st.composite
def pairs(draw):
    """A run, and another layout of it."""
    run, other = draw(layouts()), draw(layouts())
    changes = {field: getattr(other, field) for field in TAKEN}
    total = run.microbatches * run.mesh.dp
    if total % other.mesh.dp or (isinstance(run.recompute, tuple) != isinstance(other.recompute, tuple)):
        reject()
    try:
        layout = other_layout(Layout(run, check_run(run)), None, changes, Skeleton(run.model, run.seed), "cpu")
    except ConfigError:
        reject()
    return run, layout.run


def loss(team, step):
    return report_of(step, 1.0, team.step(step), team.world).loss


def whole_state(team):
    """All logical tensors that the actors of a team have, whole; copies must be alike, bit for bit."""
    found = {}
    for actor in team.all:
        for name, shard, tensor in actor.member.state.pieces():
            shard = shard or Shard(tuple(tensor.shape))
            whole = found.setdefault(name, torch.full(shard.whole, torch.nan, dtype=tensor.dtype))
            place = shard.take(whole)
            assert place.isnan().logical_or(place == tensor).all(), f"copies of {name} differ"
            place.copy_(tensor.detach())
    return found


def compare(pair):
    """Compare the run that goes on in the other layout with the one that stays, and return what it is an example of."""
    run, other = pair
    told = f"{differences(run, other)}\n{run}\n{other}"
    with own_dice():
        stays = Team.of(run)
        loss(stays, 0)
        team, _, _ = relaid(stays, other)
        before, after = whole_state(stays), whole_state(team)
        assert before.keys() == after.keys(), f"{before.keys() ^ after.keys()} in {told}"
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), f"{name} in {told}"
        now, before = loss(team, 1), loss(stays, 1)
        assert abs(now - before) <= 1e-5 * max(1.0, abs(before)), f"{now} instead of {before} in {told}"
    yield from (word.partition("=")[0] for word in " ".join(differences(run, other)).split())
    yield run.optim.kind


if __name__ == "__main__":
    sys.exit(fuzz(__doc__, pairs(), compare, 100, (Phase.generate,)))
