"""Tiling: linear layers in pieces compute what whole ones do, and every name and value outside is that of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.models.tile_names import tile_of, untiled
from raypar.errors import ConfigError
from tests.support.layouts import own_dice, tokens
from tests.support.replicas import agrees
from tests.support.team import Team
from tests.support.thread_jobs import TeamJob

SPEC = rp.GPT(layers=2, hidden=16, heads=2, seq=8, vocab=12)


def mlp():
    return [nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 4)) for _ in range(3)] + [nn.Linear(4, 4)]


def joined(found):
    whole = {}
    for name in sorted(found, key=lambda name: (untiled(name), tile_of(name).own if tile_of(name) else ())):
        whole.setdefault(untiled(name), []).append(found[name])
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in whole.items()}


class Tiled(Team):
    def weights(self, dp=0):
        return joined(super().weights(dp))

    def gradients(self):
        return joined(super().gradients())


@pytest.mark.parametrize("recompute", ["none", "full", ("full", "none", "full", "none")])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_tiles_compute_what_a_whole_layer_does(zero, recompute):
    agrees(Tiled(mlp, 1, 2, dp=2, zero=zero, tile={"layers.*.0": 3, "layers.3": 2}, recompute=recompute))


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_gather": "step"},
        {"zero_units": 2},
        {"reshard_after_forward": False},
        {"pp": 2, "schedule": "interleaved"},
        {"pp": 2, "backward": "split"},
        {"dp": 4, "shard": 2},
        {"zero_reduce": "step", "bucket_mb": 1e-4},
    ],
    ids=str,
)
def test_tiles_in_every_placement(changes):
    agrees(Tiled(mlp, **{"pp": 1, "m": 2, "dp": 2, "zero": 3, "tile": 2} | changes))


def whole_tiles(team):
    """The most tiles of each worker that were whole when one was used."""
    most = []

    def look(units, before, number):
        before(number)
        most.append(sum(unit.is_whole for unit in units))

    for worker in team.workers:
        for stage, weights in worker.member.parts.part.weights.items():
            cut = [unit for unit in weights.units if any(tile_of(name) for name in unit.digests)]
            for module in worker.stages[stage].modules:
                for part in module.modules():
                    if hasattr(part, "before"):
                        part.before = lambda number, cut=cut, before=part.before: look(cut, before, number)
    return most


@pytest.mark.parametrize("recompute", ["none", "full", ("full",) * 4])
def test_two_tiles_are_whole_at_a_time(recompute):
    team = Tiled(mlp, 1, 2, dp=2, zero=3, tile=4, recompute=recompute)
    most = whole_tiles(team)
    team.step()
    assert max(most) == 2
    gathered = [worker.member.parts.part.gathered.most for worker in team.workers]
    largest = 4 * (12 // 4 * 5 + 12 // 4 * 5)
    assert gathered == [largest] * 2


def verdict(**changes):
    run = rp.Run(model=SPEC, data=rp.Batches(tokens), microbatches=2, steps=2, timeout=20.0, **changes)
    with own_dice():
        job = TeamJob(run)
        try:
            return rp.verify(run, job), dict(job.weights().items()), job.parameters
        finally:
            job.close()


@pytest.mark.parametrize("changes", [{}, {"zero": 1}, {"mesh": rp.Mesh(pp=2, dp=2)}, {"mesh": rp.Mesh(cp=2)}], ids=str)
def test_a_tiled_gpt_is_verified_and_shown_by_the_names_of_the_whole(changes):
    fields = {"mesh": rp.Mesh(dp=2), "zero": 3} | changes
    report, weights, shapes = verdict(**fields, tile=4)
    assert report.ok, report
    _, wanted, plain_shapes = verdict(**fields)
    assert shapes == plain_shapes
    assert weights.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.allclose(weights[name], weight, atol=1e-6), name


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tile": 5}, "which does not divide its 64 outputs: use 4 or 8"),
        ({"tile": {"blocks.*.mlp.upp": 2}}, "did you mean 'blocks.*.mlp.up'"),
        ({"tile": 4, "mesh": rp.Mesh(tp=2)}, "mesh.tp is 2, which divides the same layers"),
        ({"tile": 2, "optim": rp.Muon()}, "Muon updates as a whole"),
        ({"tile": 2, "data_parallel": "parameter_server"}, "servers are not told"),
        ({"tile": 0}, "tile"),
        ({"tile": {"*": 0}}, "tile"),
    ],
    ids=str,
)
def test_tiles_that_are_not_possible_are_refused(changes, says):
    run = rp.Run(model=SPEC, data=rp.Batches(tokens), **{"mesh": rp.Mesh(dp=2)} | changes)
    with pytest.raises(ConfigError, match=says.replace("*", r"\*").replace(".", r"\.")):
        Team.of(run)


def test_a_tied_head_is_not_cut():
    run = rp.Run(model=rp.GPT(layers=1, hidden=16, heads=2, tied=True), mesh=rp.Mesh(dp=2), tile=4)
    with pytest.raises(ConfigError, match="tied with another"):
        Team.of(run)
