"""Sequences divided over the context-parallel axis compute what one plain process computes: on threads, without Ray.

Without dropout: threads share torch's generator. Of real actors each has its own: see tests/raypar.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
import torch

from raypar.actors.errors import ActionError
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.transformer import TransformerModel
from raypar.actors.sharding import Pieces, Sharding
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import GPT, Layers, Llama, Positions
from raypar.actors.specs.optim import AdamW
from raypar.actors.specs.results import losses_of, mean_loss
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import Context
from raypar.actors.worker.build.parallelize import Parallelizer, axis_styles
from raypar.config.run import check_run
from raypar.errors import ConfigError
from tests.support.local_groups import local_groups
from tests.support.snapshots import loaded, saved
from tests.support.team import Team
from tests.support.tensor_teams import agrees

MODES = get_args(Context)
MODEL = GPT(layers=2, hidden=16, heads=4, seq=16, vocab=11)


def tokens(step, microbatch, dp):
    generator = torch.Generator().manual_seed(100 * step + microbatch + 1000 * dp)
    ids = torch.randint(11, (2, 17), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, : 5 * microbatch] = -100  # all that a member has, too
    return ids[:, :-1], labels


def team_of(cp, pp=1, dp=1, tp=1, m=2, model=MODEL, **changes):
    fields = {"data": tokens, "optim": AdamW(lr=1e-2), "clip": 0.5, "steps": 3}
    return Team(None, pp, m, dp=dp, tp=tp, cp=cp, model=model, **fields | changes)


@pytest.mark.sampled
@pytest.mark.parametrize("context", MODES)
@pytest.mark.parametrize("cp", [2, 4])
def test_every_mode_computes_what_one_process_does(cp, context):
    agrees(team_of(cp, context=context))


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("context", MODES)
@pytest.mark.parametrize(("kv_heads", "cp"), [(1, 2), (2, 4)])
def test_a_llama_with_few_heads_of_keys_and_values(context, kv_heads, cp):
    model = Llama(layers=2, hidden=16, heads=4, kv_heads=kv_heads, ffn=24, seq=16, vocab=11)
    agrees(team_of(cp, model=model, context=context, steps=2))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("positions", "context"), [*product(get_args(Positions), ["ring"]), *product(["alibi", "rope"], MODES[1:])]
)
def test_any_positions(positions, context):
    attention = "materialised" if positions == "rope" else "fused"
    agrees(team_of(2, model=replace(MODEL, positions=positions, attention=attention), context=context, steps=2))


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2},
        {"dp": 2, "zero": 0},
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"pp": 2, "dp": 2, "zero": 1},
        {"data_parallel": "parameter_server"},
    ],
    ids=str,
)
@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_with_other_axes(layout, context):
    agrees(team_of(2, model=replace(MODEL, tied=True), context=context, **layout))


@pytest.mark.sampled
@pytest.mark.parametrize("context", MODES)
def test_recomputing_changes_no_bit(context):
    weights, model = [], replace(MODEL, attention="materialised")
    for recompute in ("none", "full", "selective", ("selective", "full")):
        team = team_of(2, model=model, context=context, recompute=recompute)
        team.step(0)
        weights.append(team.weights())
    for other in weights[1:]:
        assert all(torch.equal(weight, other[name]) for name, weight in weights[0].items())


def test_all_members_of_all_replicas_keep_the_same_weights_and_gradients():
    team = team_of(2, dp=2, zero=0)
    team.step(0)
    first, *others = team.workers
    for name in first.holds():
        for other in others:
            assert torch.equal(first.parameter(name), other.parameter(name)), name
            assert torch.equal(first.gradient(name), other.gradient(name)), name


def test_gradients_are_summed_over_cp_and_dp_at_once_and_a_stage_sends_its_part_of_a_sequence():
    team, m = team_of(2, pp=2, dp=2, zero=0), 2
    team.step(0)
    gradients = sum(4 * (p.numel() + 1) for p in team.workers[0].parameters().values())  # and whether there is one
    assert team.ledger("dp")[0]["all_reduce"][1] == 2 * 3 * gradients // 4
    assert team.ledger("pp")[0]["send"] == (m, m * 2 * 16 * 16 * 4 // 2)
    assert "all_reduce" not in team.ledger("cp")[0]


def test_an_evaluation_counts_every_token_once():
    ours, theirs = (losses_of(team.step(1, "evaluate")) for team in (team_of(4), team_of(1)))
    assert sum(ours[1]) == sum(theirs[1])
    assert mean_loss(*ours) == pytest.approx(mean_loss(*theirs), rel=1e-5)


def test_a_later_sequence_that_can_not_be_cut_is_told():
    def odd(step, microbatch, dp):
        return tuple(value[:, : 14 if step else None] for value in tokens(step, microbatch, dp))

    team = team_of(2, data=odd)
    team.step(0)
    with pytest.raises(ActionError, match=r"a batch has a tensor \[2, 14\]: .* must be a multiple of 4"):
        team.step(1)


@pytest.mark.sampled
@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2), (4, 2)])
def test_another_number_of_parts_reads_what_one_has_written(there, here, tmp_path):
    writer, reader = team_of(there), team_of(here)
    writer.step(0)
    loaded(reader, tmp_path, saved(writer, tmp_path))
    (tmp_path / "again").mkdir()
    saved(reader, tmp_path / "again")
    for name, weight in writer.weights().items():
        assert all(torch.equal(weight, actor.parameter(name)) for actor in reader.workers), name


FAULTS = [
    ({"cp": 3}, {}, r"context 'ring' cuts a sequence into 6 pieces, but model\.seq is 16: set model\.seq to 12 or 18"),
    ({"cp": 3}, {"context": "rsa"}, r"mesh\.cp 3: .* into 3 pieces, but model\.seq is 16: set model\.seq to 15 or 18"),
    ({"cp": 4, "tp": 4}, {"context": "ulysses"}, r"does not divide model\.heads 4: use 16 heads, or context 'ring'"),
    ({"cp": 8, "tp": 4}, {"sequence_parallel": True}, r"mesh\.cp x mesh\.tp = 32 does not divide model\.seq 16"),
    ({"cp": 2}, {"model": Layers(list, len)}, r"the user's own Layers can't be divided by tokens"),
    ({"cp": 2}, {"context": "rings"}, r"context is 'rings'"),
]


@pytest.mark.parametrize(("mesh", "changes", "says"), FAULTS, ids=str)
def test_what_does_not_fit_is_said_before_any_actor_starts(mesh, changes, says):
    with pytest.raises(ConfigError, match=says):
        check_run(Run(**{"model": MODEL, "mesh": Mesh(**mesh), "data": Batches(tokens)} | changes))


def test_ulysses_shares_heads_of_keys_and_values_only_where_they_come_out_even():
    model = Llama(layers=2, hidden=18, heads=6, kv_heads=2, seq=12, vocab=11, positions="learned")
    says = r"a tensor rank has 2 heads of keys and values, and mesh\.cp is 3: .* change model\.kv_heads"
    with pytest.raises(ConfigError, match=says):
        check_run(Run(model=model, mesh=Mesh(cp=3), context="ulysses", data=Batches(tokens)))


def test_with_tensor_parallelism_dropout_is_of_a_part_of_a_part():
    run = team_of(2, tp=2, sequence_parallel=True).run
    model = TransformerModel(replace(MODEL, dropout=0.1))
    groups = {"cp": local_groups("cp", 2)[1], "tp": local_groups("tp", 2)[0]}
    (block,) = model.materialize([1], 0, Parallelizer(model, axis_styles(run, groups)).parallelize)
    assert block.drop.sharding == Sharding({1: Pieces(4, (1,))}), "of the pieces 1 and 2 of 4 the first half"
    assert block.attn.core.drop.sharding == Sharding({1: Pieces(2, (0,))}), (
        "of the heads; of the tokens when it is drawn"
    )
    assert block.attn.core.keeps_scores(*[torch.empty(1, 2, 8, 4)] * 3)
