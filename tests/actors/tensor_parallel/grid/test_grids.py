"""A GPT or Llama divided over a grid of tensor ranks computes what one plain process computes: on threads, without Ray.

Without dropout in whole steps: threads share torch's generator. Of real actors each has its own, see
tests/raypar/test_tensor_parallel.py; here its masks are compared member by member.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from raypar.actors.errors import ActionError
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.build import build_model
from raypar.actors.pipeline.weight_grad import DeferredGradients
from raypar.actors.sharding import join_shards
from raypar.actors.specs.model import GPT, Llama, Positions
from raypar.actors.specs.optim import AdamW
from raypar.actors.specs.results import losses_of
from raypar.actors.specs.types import Context
from raypar.actors.tensor_parallel.grid.base import shard_along
from raypar.actors.worker.build.parallelize import Parallelizer, tensor_styles
from raypar.parity.verify import train_plainly
from raypar.schedules.action import Op
from tests.support.on_grid import GRIDS, groups_on
from tests.support.snapshots import loaded, read
from tests.support.team import Team
from tests.support.tensor_teams import agrees

TINY = GPT(layers=2, hidden=16, heads=4, seq=5, vocab=11)
LLAMA = Llama(layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, seq=5, vocab=11)
B, WIDTH = 4, 16


def tokens(step, microbatch, dp, samples=B, length=5):
    """Of the second microbatch the first samples have few labels, so that parts of a batch weigh differently."""
    generator = torch.Generator().manual_seed(100 * step + microbatch + 1000 * dp)
    ids = torch.randint(11, (samples, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[: samples // 2, : 3 * (microbatch % 2)] = -100
    return ids[:, :-1], labels


def every_label(*at):
    """Then the gradients need no correction, and their norms are taken once."""
    return [ids.abs() % 11 for ids in tokens(*at)]


def team_of(tp, model=TINY, m=2, samples=B, **changes):
    fields = {"data": partial(tokens, samples=samples), "optim": AdamW(lr=1e-2), "clip": 0.5, "steps": 2}
    return Team(None, changes.pop("pp", 1), m, tp=tp, model=model, **fields | changes)


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("model", [TINY, replace(LLAMA, tied=True)], ids=["gpt", "llama, tied"])
@pytest.mark.parametrize("grid", [*GRIDS, "2.5d:2x2x1"])
def test_every_grid_computes_what_one_process_does(grid, model):
    agrees(team_of(grid, model))


@pytest.mark.long
def test_nine_members_that_share_unevenly():
    agrees(team_of("2d:3x3", replace(TINY, hidden=18, heads=3, tied=True), samples=3))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("grid", "changes"),
    [("2d:2x2", {"pp": 2}), ("2d:2x2", {"dp": 2, "zero": 1})],
    ids=str,
)
def test_with_pipelines_and_replicas(grid, changes):
    agrees(team_of(grid, replace(TINY, tied=True), **changes))


@pytest.mark.sampled
@pytest.mark.parametrize(("grid", "context"), [*product(["2d:2x2"], get_args(Context)), ("3d:2x2x2", "ulysses")])
def test_with_sequences_that_are_divided_too(grid, context):
    model = replace(TINY, seq=8, positions="learned" if context == "ring" else "alibi")
    agrees(team_of(grid, model, cp=2, context=context, data=partial(tokens, length=8)))


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("positions", sorted({*get_args(Positions)} - {"learned"}))
@pytest.mark.parametrize("grid", ["2d:2x2", "3d:2x2x2"])
def test_any_positions(grid, positions):
    agrees(team_of(grid, replace(TINY, layers=1, positions=positions, attention="materialised"), steps=1, m=1))


@pytest.mark.sampled
@pytest.mark.parametrize("grid", GRIDS)
def test_recomputing_changes_no_bit(grid):
    weights = []
    for recompute in ("none", "full", "selective"):
        team = team_of(grid, replace(LLAMA, attention="materialised"), recompute=recompute)
        team.step(0)
        weights.append(team.weights())
    for other in weights[1:]:
        assert all(torch.equal(weight, other[name]) for name, weight in weights[0].items())


@pytest.mark.sampled
@pytest.mark.parametrize(("grid", "recompute"), [("2d:2x2", "selective"), ("3d:2x2x2", "none")])
def test_backwards_in_halves_have_the_bits_of_whole_ones(grid, recompute, monkeypatch):
    """All linear layers leave the gradients of their weights for W, with the messages that these need."""
    deferred, add, weights = [], DeferredGradients.add, {}
    monkeypatch.setattr(
        DeferredGradients, "add", lambda self, weight, *rest: deferred.append(weight) or add(self, weight, *rest)
    )
    for backward in ("whole", "split"):
        team = team_of(grid, LLAMA, pp=2, m=3, backward=backward, recompute=recompute)
        team.step(0)
        weights[backward] = team.weights()
        assert bool(deferred) == (backward == "split")
    assert all(torch.equal(weight, weights["whole"][name]) for name, weight in weights["split"].items())
    linear = sum(weight.dim() == 2 for weight in weights["split"].values()) - 1
    assert len({id(weight) for weight in deferred}) == len(team.all) // 2 * linear, "but the embedding"


@pytest.mark.sampled
@pytest.mark.parametrize("grid", GRIDS)
def test_the_initial_weights_are_those_of_every_layout(grid):
    wanted = train_plainly(replace(team_of(1).run, steps=0)).weights
    found = team_of(grid).weights()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in found.items())


@pytest.mark.sampled
@pytest.mark.parametrize(("grid", "parts"), [("2d:2x2", 4), ("2.5d:2x2x2", 4), ("3d:2x2x2", 8)])
def test_a_member_holds_its_part_of_every_matrix(grid, parts):
    for actor in team_of(grid, LLAMA).all:
        for name, cut in actor.holds().items():
            parameter = actor.parameters()[name]
            assert parameter.untyped_storage().nbytes() == 4 * parameter.numel()
            if len(cut.whole) == 2 and "embed" not in name and "head" not in name:
                assert parts * parameter.numel() == cut.whole[0] * cut.whole[1], name


@pytest.mark.parametrize("grid", GRIDS)
def test_masks_are_parts_of_the_one_that_one_process_draws(grid):
    """Of the residual stream, and of what attention sees."""
    found = {"drop": ([], []), "attn.core.drop": ([], [])}
    for groups in groups_on(grid):
        model = build_model(replace(TINY, dropout=0.4), 0)
        styles = tensor_styles(Mesh(tp=grid), groups, sequence=False)
        (layer,) = model.materialize([1], 0, Parallelizer(model, [styles]).parallelize)
        outside, inside = styles.styles["norm"].layout.outside, styles.styles["norm"].layout.inside
        for name, shape, over in (
            ("drop", (8, 5, 16), {0: outside.batch, 2: (outside.features,)}),
            ("attn.core.drop", (8, 4, 5, 5), {0: inside.batch, 1: (inside.features,)}),
        ):
            cut = shard_along(shape, over)
            torch.manual_seed(1)
            found[name][0].append(cut)
            found[name][1].append(layer.get_submodule(name)(torch.ones(cut.shape)))
    for cuts, parts in found.values():
        torch.manual_seed(1)
        assert torch.equal(join_shards(cuts, parts), F.dropout(torch.ones(cuts[0].whole), 0.4))


def test_a_step_on_a_square_sends_what_the_formula_says():
    """Per linear layer: products forward and gradients backward along the row, weights twice and their gradients along
    the column; two numbers a token and norm; the embedding's sum; three numbers a token of the loss, and the loss."""
    q, m = 2, 2
    team = team_of("2d:2x2", replace(TINY, vocab=12), m=m, data=every_label)
    team.step(0)
    tokens_here, blocks = B * 5 // q, TINY.layers
    linears = blocks * [(16, 16)] * 4 + blocks * [(64, 16), (16, 64)] + [(12, 16)]
    out = m * (q - 1) * sum(tokens_here * outputs // q * 4 for outputs, _ in linears)
    weights = m * (q - 1) * sum(outputs * inputs // q**2 * 4 for outputs, inputs in linears)
    norms = m * (q - 1) * (2 * blocks + 1) * 2 * tokens_here * 4  # an all_reduce of two sends as much as an all_gather
    loss = m * 3 * tokens_here * 4 * 2 * (q - 1) // q
    embedding = m * (q - 1) * tokens_here * 16 // q * 4
    once = sum(4 * parameter.numel() for name, parameter in team.all[0].parameters().items() if alike(team, name))
    row, col = ({op: count for op, (_, count) in team.ledger(axis)[0].items()} for axis in ("tp.row", "tp.col"))
    assert row == {"reduce": out, "broadcast": out, "all_gather": norms, "all_reduce": norms + loss}
    assert col == {
        "broadcast": 2 * weights,
        "reduce": weights,
        "reduce_scatter": embedding,
        "all_gather": embedding,
        "all_reduce": 2 * (q - 1) * (once + m * 4) // q,
    }
    assert team.ledger("tp")[0] == {"all_reduce": (1, 2 * 3 * 2 * 21 * 8 // 4)}, "two sums of squares"


def alike(team, name):
    """Whether all in a column have the same part."""
    return team.all[0].holds()[name] == team.all[2].holds()[name]


def test_over_the_depth_gradients_are_sent_once():
    """And the loss."""
    team, m = team_of("2.5d:2x2x2", m=3), 3
    team.step(0)
    held = sum(4 * parameter.numel() for parameter in team.all[0].parameters().values())
    assert team.ledger("tp.depth")[0] == {"all_reduce": (1 + m, held + 4 * m)}


def test_a_step_in_a_cube_sends_what_the_formula_says():
    """Weights come twice along x and their gradients go once; inputs are gathered once for all that they go into,
    outputs are scattered, and gradients take the same ways back."""
    team, m, blocks = team_of("3d:2x2x2", replace(LLAMA, vocab=12), data=every_label), 2, LLAMA.layers
    team.step(0)
    x, y, z = ({op: count for op, (_, count) in team.ledger(f"tp.{axis}")[0].items()} for axis in "xyz")
    held = team.all[0].parameters().values()
    matrices, norms = (sum(4 * p.numel() for p in held if p.dim() == dims) for dims in (2, 1))
    table, tokens_here = 12 * 16 // 8 * 4, B * 5 // 4

    def moved(*features):
        """Bytes of what a member has of activations of so many features."""
        return m * sum(tokens_here * count // 2 * 4 for count in features)

    loss, numbers = m * 4, m * tokens_here * 4  # a scalar, and a number a token
    assert x == {
        "all_gather": m * (2 * matrices - table),  # the table is not needed by its backward
        "reduce_scatter": m * matrices,
        "all_reduce": norms + loss,
    }
    gathered, scattered = moved(*blocks * (16, 16), 16), moved(*blocks * (16, 16), 16)  # q and gate; out and down
    assert y == {
        "all_gather": gathered + scattered,
        "reduce_scatter": gathered + scattered,
        "all_reduce": norms + 3 * numbers,
    }
    gathered, scattered = moved(*blocks * (16, 24)), moved(*blocks * (16, 8, 8, 24, 24), 12)
    assert z == {
        "all_gather": gathered + scattered + (2 * blocks + 1) * numbers,
        "reduce_scatter": gathered + scattered,
        "all_reduce": (2 * blocks + 1) * numbers + loss,
    }


@pytest.mark.long
def test_selective_in_a_cube_gathers_the_inputs_of_linear_layers_once_more():
    """Those of attention, MLP and head along y, of the layers that lead out of them along z."""
    teams = [team_of("3d:2x2x2", recompute=recompute) for recompute in ("none", "selective")]
    none, selective = [team.step(0) and [team.ledger(f"tp.{axis}")[0] for axis in "yz"] for team in teams]
    each, blocks = 2 * B * 5 // 4 * 4 // 2, TINY.layers  # bytes of a feature, of two microbatches
    for before, after, features in zip(none, selective, ((2 * blocks + 1) * 16, blocks * (16 + 64)), strict=True):
        assert after["all_gather"][1] - before["all_gather"][1] == each * features
        assert after["reduce_scatter"] == before["reduce_scatter"]


@pytest.mark.sampled
@pytest.mark.parametrize("grid", GRIDS)
def test_an_evaluation_is_reported_once(grid):
    ours, theirs = (losses_of(team_of(tp).step(1, "evaluate")) for tp in (grid, 1))
    assert ours[1] == theirs[1] == [20, 14]
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)


@pytest.mark.parametrize("op", [Op.F, Op.B])
def test_a_member_that_is_gone_lets_everybody_go(op):
    """Also who is on no line with it."""
    team = team_of("2d:2x2")
    gone = team.all[3]
    perform = gone.member._methods[op]

    def leave(action):
        gone.abort()
        perform(action)

    gone.member._methods[op] = leave
    for rank, error in enumerate(team.each(lambda actor: actor.train(0))):
        assert isinstance(error, ActionError)
        assert str(error).startswith(f"actor pp=0 tp={rank}: action 0{op.value}0")


LAYOUTS = ["2d:2x2", 2, "2.5d:2x2x2", 1, "3d:2x2x2", "2d:2x2"]


@pytest.mark.sampled
@pytest.mark.parametrize(("here", "there"), list(pairwise(LAYOUTS)))
def test_every_layout_reads_what_another_has_written(here, there, tmp_path):
    """Weights and what the optimizer keeps, bit by bit: written anew it is the same logical tensors."""
    model = replace(TINY, tied=True)
    first, second = (team_of(tp, model) for tp in (here, there))
    first.step(0)
    written = read(first, tmp_path / "a")
    read(loaded(second, tmp_path / "a", written[1]), tmp_path / "b")
    again = read(second, tmp_path / "b")
    assert written[0].keys() == again[0].keys()
    assert all(torch.equal(tensor, again[0][name]) for name, tensor in written[0].items())
