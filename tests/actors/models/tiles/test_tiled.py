"""Tiling: linear layers in pieces compute what whole ones do, and every name and value outside is that of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.checkpoint.assembler import Assembler, ShardFolder
from raypar.actors.models.tiles.tile_names import tile_of, untiled
from raypar.checkpoint.manifest import manifest_of
from raypar.errors import ConfigError
from raypar.planner.sizes.sized_run import counts_of
from raypar.planner.sizes.tensors import Weight
from raypar.planner.sizes.units import Units
from tests.support.layouts import own_dice, tokens
from tests.support.replicas import agrees
from tests.support.team import Team, batch, mse
from tests.support.thread_jobs import TeamJob

SPEC = rp.GPT(layers=2, hidden=16, heads=2, seq=8, vocab=12)


def mlp():
    return [nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 4)) for _ in range(3)] + [nn.Linear(4, 4)]


def linears_alone():
    return [nn.Linear(4, 4) for _ in range(2)]


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


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("recompute", ["none", "full", ("full", "none", "full", "none")])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_tiles_compute_what_a_whole_layer_does(zero, recompute):
    agrees(Tiled(mlp, 1, 2, dp=2, zero=zero, tile={"layers.*.0": 3, "layers.3": 2}, recompute=recompute))


@pytest.mark.sampled
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


@pytest.mark.sampled
@pytest.mark.parametrize("recompute", ["none", "full", ("full",) * 4])
def test_two_tiles_are_whole_at_a_time(recompute):
    team = Tiled(mlp, 1, 2, dp=2, zero=3, tile=4, recompute=recompute)
    most = whole_tiles(team)
    team.step()
    assert max(most) == 2
    gathered = [worker.member.parts.part.gathered.most for worker in team.workers]
    largest = 4 * (12 // 4 * 5 + 12 // 4 * 5)
    assert gathered == [largest] * 2


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("model", "tile"),
    [
        (SPEC, 4),
        (SPEC, {"head.out": 2, "blocks.1.mlp.down": 16}),
        (rp.Llama(layers=2, hidden=16, heads=2, seq=8, vocab=256, ffn=24), 4),
        (rp.Layers(mlp, mse), {"layers.*.0": 3, "layers.1.2": 4}),
    ],
    ids=["gpt", "gpt by name", "llama", "own layers"],
)
@pytest.mark.parametrize("zero_units", [1, 2])
def test_the_formula_knows_what_is_gathered_at_a_time(model, tile, zero_units):
    data = rp.Batches(batch if isinstance(model, rp.Layers) else tokens)
    run = rp.Run(model=model, mesh=rp.Mesh(dp=2), zero=3, tile=tile, microbatches=2, data=data, zero_units=zero_units)
    team = Team.of(run)
    team.step()
    (units,) = counts_of(run, team.programs["train"], None).units
    assert [worker.member.parts.part.gathered.most for worker in team.workers] == [4 * units.two] * 2


def saved(team, folder):
    """A checkpoint of a team after two steps."""
    for number in range(2):
        team.step(number)
    return written(team, folder)


def written(team, folder):
    """The tensors of a checkpoint of a team, by logical name."""
    folder.mkdir(exist_ok=True)
    team.each(lambda actor: actor.member.state.stage())
    parts = team.each(lambda actor: actor.member.state.write(str(folder), beside=False))
    manifest = manifest_of(2, 0, {}, [one for one in parts if one is not None])
    assert not list(manifest.faults())
    return manifest.tensors


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 4)])
@pytest.mark.parametrize("zero", [1, 3])
def test_a_checkpoint_goes_from_any_tiling_to_any_other(tmp_path, before, after, zero):
    fields = {"model": SPEC, "data": rp.Batches(tokens), "mesh": rp.Mesh(dp=2), "microbatches": 2, "zero": zero}
    teams = [Tiled.of(rp.Run(**fields, tile=tile)) for tile in (before, after)]
    tensors = saved(teams[0], tmp_path)
    assert set(tensors) == {untiled(name) for name in tensors}
    done = teams[1].each(lambda actor: actor.member.state.load(ShardFolder(tmp_path), tensors))
    assert done == [None, None]
    held = [team.weights() for team in teams]
    assert all(held[0][name].equal(held[1][name]) for name in held[0] | held[1])
    again = written(teams[1], tmp_path / "again")
    assert again.keys() == tensors.keys()
    one, other = (Assembler(ShardFolder(folder)) for folder in (tmp_path, tmp_path / "again"))
    assert [name for name in tensors if not one.read(tensors[name]).equal(other.read(again[name]))] == []
    losses = [[result.losses for result in team.step(2)] for team in teams]
    assert torch.tensor(losses[0]).allclose(torch.tensor(losses[1]), atol=1e-6)


def verdict(**changes):
    run = rp.Run(model=SPEC, data=rp.Batches(tokens), microbatches=2, steps=2, timeout=20.0, **changes)
    with own_dice():
        job = TeamJob(run)
        try:
            report = rp.verify(run, job)
            gradients = {
                name: (job.grad(name), job.grads(name)) for name in ("blocks.1.mlp.up.weight", "head.out.weight")
            }
            return report, dict(job.weights().items()), job.parameters, gradients
        finally:
            job.close()


ALONE = {"mesh": rp.Mesh(), "zero": None}  # nothing but the tiles adds in another order


@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes", [{}, {"zero": 1}, {"mesh": rp.Mesh(pp=2, dp=2)}, {"mesh": rp.Mesh(cp=2)}, ALONE], ids=str
)
def test_a_tiled_gpt_is_verified_and_shown_by_the_names_of_the_whole(changes):
    fields = {"mesh": rp.Mesh(dp=2), "zero": 3} | changes
    report, weights, shapes, gradients = verdict(**fields, tile=4)
    assert report.ok, report
    for name, (whole, parts) in gradients.items():
        there = torch.zeros_like(whole)
        for shard, gradient in parts.values():
            assert shard.whole == shapes[name]
            assert torch.equal(gradient, shard.take(whole)), name
            shard.put(there, torch.ones_like(gradient))
        assert there.all(), name
    _, wanted, plain_shapes, _ = verdict(**fields)
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
        ({"tile": 2, "data_parallel": "parameter_server"}, "servers do not know tiles"),
        ({"tile": 0}, "tile"),
        ({"tile": {"*": 0}}, "tile"),
    ],
    ids=str,
)
def test_tiles_that_are_not_possible_are_refused(changes, says):
    run = rp.Run(model=SPEC, data=rp.Batches(tokens), **{"mesh": rp.Mesh(dp=2)} | changes)
    with pytest.raises(ConfigError, match=says.replace("*", r"\*").replace(".", r"\.")):
        Team.of(run)


def test_a_tile_has_its_share_of_a_layer():
    shapes = {"layers.0.0.weight": (12, 8), "layers.0.0.bias": (12,), "layers.0.2.weight": (4, 12)}
    layer = [Weight(name, shape, shape, is_linear=True) for name, shape in shapes.items()]
    assert Units.of([[layer]], {"layers.0.0": 3}).largest == [12 * 4, *[(8 * 12 + 12) // 3] * 3]
    assert Units.of([[layer]], {"*": 2}).largest == [(8 * 12 + 12) // 2] * 2 + [12 * 4 // 2] * 2


def test_the_one_matrix_of_muon_among_those_of_adamw_is_not_cut():
    with pytest.raises(ConfigError, match=r"tile cuts layers\.1, whose matrix Muon updates as a whole"):
        Team(linears_alone, 1, 2, dp=2, zero=3, tile=2, optim=rp.Muon(adamw=("layers.0.*",)))


def test_a_tied_head_is_not_cut():
    run = rp.Run(model=rp.GPT(layers=1, hidden=16, heads=2, tied=True), mesh=rp.Mesh(dp=2), tile=4)
    with pytest.raises(ConfigError, match="tied with another"):
        Team.of(run)
