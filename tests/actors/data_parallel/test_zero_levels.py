"""ZeRO stages 2 and 3, and hybrid sharding: the numbers of stage 1, with less memory; what is moved, and when."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.model import GPT, Layers
from raypar.actors.specs.optim import AdamW
from raypar.actors.specs.precision import Precision
from raypar.actors.specs.run import Run
from raypar.actors.tensors import dtype_of
from tests.support.replicas import agrees, shared
from tests.support.team import Team, linears, mse

ELEMENT = 4  # bytes of fp32
ADAM = {"optim": AdamW(lr=0.01), "clip": 0.5}
PLACEMENTS = {
    "layer by layer": {},
    "kept for the backward": {"reshard_after_forward": False},
    "kept in the last stage": {"reshard_after_forward": "except_last"},
    "once a step": {"zero_gather": "step"},
    "one stage at a time": {"zero_gather": "step", "zero_resident": 1},
    "two layers": {"zero_units": 2},
}


def trained(**changes):
    team = Team(**changes)
    results = [team.step(number) for number in range(2)]
    losses = [[result.losses for result in results[0]], [result.losses for result in results[1]]]
    return team, losses, team.weights(), team.gradients()


def bits(**changes):
    _, losses, weights, gradients = trained(**changes)
    return (
        losses,
        {name: weight.tolist() for name, weight in weights.items()},
        {name: None if gradient is None else gradient.tolist() for name, gradient in gradients.items()},
    )


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize(("pp", "dp"), [(1, 2), (1, 3), (2, 2)])
def test_once_a_step_all_levels_have_the_same_bits(pp, dp, schedule):
    """The same additions in the same order."""
    fields = {"fn": linears(4), "pp": pp, "m": 4, "schedule": schedule, "dp": dp, "bucket_mb": 1e-4, **ADAM}
    wanted = bits(**fields, zero=1)
    for level in (2, 3):
        assert bits(**fields, zero=level, zero_reduce="step") == wanted


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("pp", "schedule"), [(1, "gpipe"), (2, "1f1b"), (2, "interleaved")])
def test_every_placement_of_gathers_has_the_same_bits(pp, schedule, placement):
    fields = {"fn": linears(6), "pp": pp, "m": 4, "schedule": schedule, "dp": 2, "bucket_mb": 1e-4, **ADAM}
    wanted = bits(**fields, zero=2)
    assert bits(**fields, zero=3, **PLACEMENTS[placement]) == wanted


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize(("pp", "dp", "shard"), [(1, 4, 2), (2, 4, 2), (1, 6, 3)])
def test_hybrid_sharding_computes_what_one_process_does(pp, dp, shard, level):
    agrees(Team(linears(4), pp, 2, dp=dp, shard=shard, zero=level, bucket_mb=1e-4, **ADAM))


@pytest.mark.parametrize("level", [2, 3])
def test_stages_that_are_run_again(level):
    agrees(Team(linears(4), 2, 4, dp=2, zero=level, recompute="full", **ADAM))


def test_layers_that_are_run_again():
    agrees(Team(linears(4), 1, 2, dp=2, zero=3, recompute=("full", "none", "full", "none"), **ADAM))


@pytest.mark.sampled
@pytest.mark.parametrize("backward", ["split", "auto", "whole"])
def test_split_backwards(backward):
    agrees(Team(linears(4), 2, 4, dp=2, zero=3, backward=backward, **ADAM))


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("placement", ["layer by layer", "once a step"])
@pytest.mark.parametrize(
    ("pattern", "pp", "schedule"), [("abca", 1, "interleaved"), ("abcacb", 3, "interleaved"), ("aba", 1, "1f1b")]
)
def test_weights_that_layers_share(pattern, pp, schedule, placement):
    agrees(Team(shared(pattern), pp, 6, schedule, dp=2, zero=3, bucket_mb=1e-4, **PLACEMENTS[placement]))


def sent(team):
    """Bytes that all actors sent over dp by op, and the calls of one actor."""
    tables = team.ledger("dp")
    ops = {op for table in tables for op in table}
    return {op: sum(table.get(op, (0, 0))[1] for table in tables) for op in ops}


@pytest.mark.sampled
@pytest.mark.parametrize("dp", [2, 3])
@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize(
    ("placement", "gathers"),
    [("layer by layer", lambda m: 2 * m), ("kept for the backward", lambda m: 1), ("once a step", lambda m: 1)],
    ids=["layer by layer", "kept for the backward", "once a step"],
)
def test_it_moves_two_or_three_times_the_parameters(placement, gathers, m, dp):
    """All replicas together, in dp - 1 times the bytes of the parameters (Rajbhandari et al. 2020, section 7).

    A row F0 B0 F1 B1 ... that keeps weights for the backward never frees them before its end.
    """
    for when, reductions in (("step", 1), ("microbatch", m)):
        fields = {"zero": 3, "zero_reduce": when, "bucket_mb": 1e-4, **PLACEMENTS[placement]}
        team = Team(linears(4), 1, m, dp=dp, **fields)
        weights, flags = 4 * (16 + 4), 4 * 2
        before = sent(team)
        team.step(0)
        after = sent(team)
        moved = {op: after[op] - before.get(op, 0) for op in after}
        assert moved["all_gather"] == gathers(m) * (dp - 1) * weights * ELEMENT
        assert moved["reduce_scatter"] == (dp - 1) * reductions * (weights + flags) * ELEMENT
        assert moved["reduce"] == (dp - 1) * 3 * 8, "the ballot"
        assert "broadcast" not in moved


def held(worker):
    """Bytes of whole weights on a worker now."""
    units = [unit for weights in worker.member.parts.part.weights.values() for unit in weights.units]
    return sum(unit.num_bytes for unit in units if unit.is_whole)


def test_between_steps_an_actor_holds_only_its_parts():
    team = Team(linears(4), 1, 2, dp=2, zero=3, **ADAM)
    team.step(0)
    assert [held(worker) for worker in team.workers] == [0, 0]
    for worker in team.workers:
        part = worker.member.parts.part
        assert sum(p.untyped_storage().nbytes() for p in part.parameters.values()) == ELEMENT * len(part.parameters)
        assert all(p.isnan().all() for p in part.parameters.values()), "what is freed must not be taken for weights"
    names = [set(worker.holds()) for worker in team.workers]
    assert names[0] | names[1] == set(team.workers[0].member.parts.part.parameters)
    assert not names[0] & names[1]


class Columns(nn.Module):
    """Its weight lies in memory column by column."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4).t())

    def forward(self, x):
        return nn.functional.linear(x, self.weight).tanh()


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_weights_that_lie_column_by_column(offload):
    """An optimizer goes through a weight and its gradient in the order of memory."""
    fn = lambda: [Columns(), nn.Linear(4, 4)]  # noqa: E731
    agrees(Team(fn, 1, 2, dp=2, zero=3, offload=offload, **ADAM))


class Spy(nn.Module):
    """Counts how many units are whole when its forward and its backward run."""

    def __init__(self, seen):
        super().__init__()
        self.linear, self.seen, self.units = nn.Linear(4, 4), seen, []

    def forward(self, x):
        self.seen.append(sum(unit.is_whole for unit in self.units))
        out = self.linear(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: self.seen.append(sum(unit.is_whole for unit in self.units)))
        return out


def spied(**changes):
    seen = []
    team = Team(lambda: [Spy(seen) for _ in range(6)], 1, 2, dp=2, zero=3, **changes)
    for worker in team.workers:
        units = [unit for weights in worker.member.parts.part.weights.values() for unit in weights.units]
        for stage in worker.stages.values():
            for module in stage.modules:
                module.units = units
    team.step(0)
    return seen


def test_layer_by_layer_two_units_are_whole_at_a_time_and_once_a_step_all_are():
    assert max(spied()) == 2
    assert max(spied(zero_gather="step")) == 6


def test_gradients_of_others_are_gone_when_they_are_reduced():
    """After a backward only an actor's parts of the sums are left, and no flat tensor but those under way."""
    team = Team(linears(6), 1, 2, dp=2, zero=2, bucket_mb=1e-4, **ADAM)
    left = []
    for worker in team.workers:
        reducer = worker.member.parts.reducer
        flush = reducer.flush

        def looked(stage, reducer=reducer, flush=flush):
            flush(stage)
            left.append([flat for flat in reducer._flats if flat is not None])
            for number, total in reducer.sums._sums.items():
                assert total.numel() == reducer.buckets[number].layout.summed_count

        reducer.flush = looked
    team.step(0)
    assert left == [[]] * len(left)
    assert all(worker.member.parts.reducer.sums._sums for worker in team.workers)


def test_a_gpt_at_level_3_has_the_bits_of_level_1():
    def made(level):
        spec = GPT(layers=3, hidden=16, heads=2, seq=8, vocab=256, tied=True)
        run = Run(model=spec, mesh=Mesh(pp=1, dp=2), microbatches=2, zero=level, steps=2, zero_reduce="step")
        team = Team.of(run)
        results = [[result.losses for result in team.step(number)] for number in range(2)]
        return results, {name: weight.tolist() for name, weight in team.weights().items()}

    assert made(3) == made(1)


def test_an_evaluation_gathers_too():
    team = Team(linears(4), 2, 2, dp=2, zero=3)
    before = [result.losses for result in team.step(0, "evaluate")]
    assert [result.losses for result in team.step(0, "evaluate")] == before
    assert [held(worker) for worker in team.workers] == [0] * 4


@pytest.mark.sampled
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_masters_of_sharded_weights_have_the_bits_of_level_1(compute):
    """bf16 layers and fp32 masters, which are shared out once: no copy beside the shards."""
    fields = {"fn": linears(4), "pp": 2, "m": 2, "dp": 2, "bucket_mb": 1e-4, "precision": Precision(compute=compute)}
    half = dtype_of(compute)
    _, losses, weights, gradients = trained(**fields, **ADAM, zero=1)
    for level in (2, 3):
        _, *found = trained(**fields, **ADAM, zero=level, zero_reduce="step")
        assert found[0] == losses
        assert all(found[1][name].to(half).equal(weight) for name, weight in weights.items())
        assert all(found[2][name].equal(gradient) for name, gradient in gradients.items())
    team = Team(**fields, **ADAM, zero=3)
    team.step(0)
    for worker in team.workers:
        part = worker.member.parts.part
        assert {master.dtype for master in part.masters.parameters.values()} == {torch.float32}
        units = [unit for weights in part.weights.values() for unit in weights.units]
        assert {name for unit in units for name in unit.shards} == set(part.masters.parameters)


class Counting(nn.Module):
    """A linear layer whose output depends on a buffer that each forward changes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.randn(1))

    def forward(self, x):
        self.count.add_(1.0)
        return self.linear(x).tanh() * (1 + 0.01 * self.count)


def one_buffer():
    """Three layers that share a buffer."""
    layers = [Counting() for _ in range(3)]
    for layer in layers[1:]:
        layer.count = layers[0].count
    return layers


def one_module():
    """Two layers that share a module with buffers."""
    norm = nn.BatchNorm1d(4)
    return [nn.Sequential(nn.Linear(4, 4), norm) for _ in range(2)]


SHARED = {
    "level 3": ({"dp": 2}, {"zero": 3, "zero_reduce": "step"}),
    "level 3, bf16": ({"dp": 2, "precision": Precision("bf16")}, {"zero": 3, "zero_reduce": "step"}),
    "offload": ({}, {"offload": "parameters"}),
    "tensor group": ({"dp": 2, "tp": 2}, {"zero": 3, "zero_reduce": "step"}),
}


@pytest.mark.parametrize("kind", list(SHARED))
@pytest.mark.parametrize(("fn", "divided"), [(one_buffer, "layers.*.linear"), (one_module, "layers.*.0")])
def test_a_buffer_of_several_layers_is_one_also_if_they_are_made_one_by_one(fn, divided, kind):
    common, changes = SHARED[kind]
    plan = {divided: "column_gather_output"} if "tp" in common else {}
    fields = {"model": Layers(fn, mse, plan=plan), "pp": 1, "m": 2, **common, **ADAM}
    expected, *found = [trained(fn=None, **fields, **one) for one in ({}, changes)]
    for team, losses, *_ in found:
        assert losses == expected[1]
        for worker, other in zip(team.workers, expected[0].workers, strict=True):
            fixed, wanted = worker.member.parts.part.fixed(), other.member.parts.part.fixed()
            assert {name: one.tolist() for name, one in fixed.items()} == {k: v.tolist() for k, v in wanted.items()}
