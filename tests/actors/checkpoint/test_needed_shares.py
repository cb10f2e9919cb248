"""An actor goes back to a step with the shares that it needs alone, in the same layout and in others."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.checkpoint.snapshot_address import SnapshotOwner
from raypar.actors.relayout.share_index import ShareIndex
from raypar.actors.worker.snapshot_keeper import SnapshotKeeper
from tests.support.team import Team, batch, linears, mse

MODEL = rp.GPT(layers=2, hidden=16, heads=2, seq=8, vocab=256)
GPT = {"model": MODEL, "data": rp.Text()}
OWN = rp.Layers(linears(), mse)
RUN = rp.Run(model=OWN, data=rp.Batches(batch), microbatches=4, steps=9, optim=rp.AdamW(lr=1e-2), max_failures=1)
STEP = 1
LONG = pytest.mark.long


def normed():
    return [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))]


NORMED = {"model": rp.Layers(normed, mse), "optim": rp.SGD(lr=0.1)}
TIED = GPT | {"model": replace(MODEL, tied=True)}
MOE = GPT | {"model": replace(MODEL, moe=rp.MoE(experts=4, top_k=2))}


def on(zero=0, **axes):
    return {"mesh": rp.Mesh(**axes), "microbatches": 4 // axes.get("dp", 1), "zero": zero}


def keeper_of(actor):
    return SnapshotKeeper(actor.member.context.plan, lambda step: None)


def with_files(actor, files):
    """The keeper of an actor of another layout, to which the files of some shares have come."""
    keeper = SnapshotKeeper(replace(actor.member.context.plan, layout=1), lambda step: None)
    for share, fds in files.items():
        keeper._held.adopt(share, map(os.dup, fds))
    return keeper


def state(actor):
    return {(name, str(shard)): tensor.clone() for name, shard, tensor in actor.member.state.pieces()}


def alike(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def gone_back(team, files, needed):
    """By rank what actors have of the state that had none and went back with these shares; or why one could not."""

    def go_back(actor):
        for _, _, tensor in actor.member.state.pieces():
            tensor.detach().zero_()
        shares = needed[team.all.index(actor)]
        with ExitStack() as stack:
            keeper = with_files(actor, {share: files[share] for share in shares})
            stack.callback(keeper.leave, comes_back=False)
            keeper.restore(STEP, shares, (), actor.member.state)
        return state(actor)

    return team.each(go_back)


def restored(before, after):
    """By rank of the layout after, whose shares it needs, once these are found to be enough and no more.

    That they are enough is seen by going back with all of them and with these alone: to the same bits. That they are no
    more is seen by leaving one out for each actor in turn: it can't go back then, or has less.
    """
    team, other = Team.of(replace(RUN, **before)), Team.of(replace(RUN, **after))
    keepers, size = [keeper_of(actor) for actor in team.all], team.world.size
    team.step(0)
    for actor, keeper in zip(team.all, keepers, strict=True):
        keeper.after(STEP, actor.member.state)
    shares = [SnapshotOwner(0, rank) for rank in range(size)]
    files = {share: keeper._slots.files for share, keeper in zip(shares, keepers, strict=True)}
    index = ShareIndex({share: keepers[share.rank].contents(STEP, [share])[share] for share in shares})
    needed = [index.needed(actor.member.state.wanted(index.shapes)) for actor in other.all]
    everything = gone_back(other, files, [shares] * len(needed))
    only = gone_back(other, files, needed)
    assert all(alike(one, other) for one, other in zip(everything, only, strict=True))
    for out in range(max(map(len, needed))):
        fewer = [[share for at, share in enumerate(its) if at != out] for its in needed]
        for rank, found in enumerate(gone_back(other, files, fewer)):
            is_less = isinstance(found, Exception) or not alike(found, everything[rank])
            assert is_less == (out < len(needed[rank])), f"rank {rank} without {needed[rank][out : out + 1]}"
    for keeper in keepers:
        keeper.leave(comes_back=False)
    return [[share.rank for share in its] for its in needed]


ALL, FOUR = [0, 1, 2, 3], range(4)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("before", "after", "needed"),
    [
        pytest.param(on(dp=4), on(dp=4), [[0]] * 4, id="replicas"),
        pytest.param(on(1, dp=4), on(1, dp=4), [ALL] * 4, id="zero 1"),
        pytest.param(on(3, dp=4), on(3, dp=4), [[rank] for rank in FOUR], id="zero 3"),
        pytest.param(on(1, dp=4, shard=2), on(1, dp=4, shard=2), [ALL] * 4, id="copies of shards, zero 1"),
        pytest.param(on(3, dp=4, shard=2), on(3, dp=4, shard=2), [[0, 2], [1, 3]] * 2, id="copies of shards, zero 3"),
        pytest.param(on(dp=2, pp=2), on(dp=2, pp=2), [[0], [0], [2], [2]], id="stages of replicas"),
        pytest.param(on(dp=2, pp=2), on(dp=4), [[0, 2]] * 4, id="stages become replicas"),
        pytest.param(on(1, dp=4), on(1, dp=2), [ALL] * 2, id="half of the replicas", marks=LONG),
        pytest.param(on(dp=2, tp=2) | GPT, on(dp=2, tp=2) | GPT, [[0], [0, 1]] * 2, id="tensor groups"),
        pytest.param(on(tp=2) | GPT, on(dp=2) | GPT, [[0, 1]] * 2, id="tensor ranks become replicas"),
        pytest.param(on(pp=2) | GPT | {"tile": 2}, on(tp=2) | GPT, [[0, 1]] * 2, id="tiles"),
        pytest.param(on(dp=2) | NORMED, on(dp=2) | NORMED, [[0], [0, 1]], id="running statistics"),
        pytest.param(on(dp=2) | NORMED, on(dp=4) | NORMED, [[0], [0, 1], [0], [0]], id="statistics of replica 0"),
    ],
)
def test_the_shares_that_an_actor_needs_are_enough_and_no_more(before, after, needed):
    assert restored(before, after) == needed


@pytest.mark.parametrize(("here", "there"), [(on(1, dp=2), on(1, dp=2)), (on(2, dp=4), on(1, dp=2))], ids=str)
def test_spans_of_replicas_are_found_and_restored(here, there):
    restored(here, there)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(on(pp=2, dp=2, tp=2) | GPT, on(pp=2, dp=2, tp=2) | GPT, id="all axes", marks=LONG),
        pytest.param(on(tp="2d:2x2") | GPT, on(tp=2) | GPT, id="grid", marks=LONG),
        pytest.param(on(pp=2) | TIED, on(pp=2, dp=2) | TIED, id="tied"),
        pytest.param(on(2, dp=4) | {"mesh": rp.Mesh(dp=4, shard=2)}, on(3, dp=2), id="groups of shards"),
        pytest.param(on(dp=2, ep=2) | MOE, on(pp=2) | MOE, id="experts", marks=LONG),
        pytest.param(on(dp=2, pp=2) | {"precision": rp.Precision(compute="fp16")}, on(1, dp=2), id="fp16"),
    ],
)
def test_so_they_are_in_uneven_layouts(before, after):
    restored(before, after)
