"""A GPT divided over the tensor-parallel axis computes what one plain process computes: on threads, without Ray.

Without dropout: threads share torch's generator. Of real actors each has its own: tests/raypar/test_tensor_parallel.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
import torch

from raypar.actors.errors import ActionError
from raypar.actors.pipeline.weight_grad import DeferredGradients
from raypar.actors.specs.model import Llama, Positions
from raypar.actors.specs.optim import AdamW
from raypar.actors.specs.results import losses_of
from raypar.parity.verify import train_plainly
from raypar.schedules.action import Op
from tests.support.snapshots import loaded, read
from tests.support.team import Team
from tests.support.tensor_teams import LOSS, TINY, agrees, longer, tokens


def team_of(tp, pp=1, dp=1, m=2, model=TINY, **changes):
    fields = {"data": tokens, "optim": AdamW(lr=1e-2), "clip": 0.5, "steps": 3}
    return Team(None, pp, m, dp=dp, tp=tp, model=model, **fields | changes)


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize(
    ("tp", "pp", "dp", "zero"), [(2, 1, 1, 0), (4, 1, 1, 0), (2, 2, 1, 0), (2, 1, 2, 0), (2, 2, 2, 1)]
)
@pytest.mark.parametrize(("sequence", "tied"), [(False, False), (True, True)], ids=["", "sequence, tied"])
def test_every_layout_computes_what_one_process_does(tp, pp, dp, zero, sequence, tied):
    model = replace(TINY, tied=tied, seq=8)
    agrees(team_of(tp, pp, dp, model=model, zero=zero, data=longer, sequence_parallel=sequence))


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_llama_with_few_heads_of_keys_and_values(tp, kv_heads, sequence):
    """Fewer than members are shared: each computes what its queries ask for."""
    model = Llama(layers=2, hidden=16, heads=4, kv_heads=kv_heads, ffn=24, seq=8, vocab=11)
    agrees(team_of(tp, pp=2, model=model, data=longer, sequence_parallel=sequence, steps=3))


@pytest.mark.each_value
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize(
    "model", [replace(TINY, seq=8), Llama(layers=4, hidden=16, heads=4, kv_heads=2, seq=8, vocab=11)]
)
def test_backwards_in_halves_have_the_bits_of_whole_ones(model, sequence, recompute, monkeypatch):
    """All linear layers that are divided leave the gradients of their weights for W."""
    deferred, add = [], DeferredGradients.add
    monkeypatch.setattr(
        DeferredGradients, "add", lambda self, weight, *rest: deferred.append(weight) or add(self, weight, *rest)
    )
    weights = {}
    for backward in ("whole", "split"):
        settings = {"data": longer, "sequence_parallel": sequence, "recompute": recompute, "backward": backward}
        team = team_of(2, pp=2, m=3, model=model, **settings)
        for step in range(2):
            team.step(step)
        weights[backward] = team.weights()
        assert bool(deferred) == (backward == "split")
    assert all(torch.equal(weight, weights["whole"][name]) for name, weight in weights["split"].items())
    if recompute == "none":
        linear = sum(name.endswith(".weight") and weight.dim() == 2 for name, weight in weights["split"].items())
        embeddings = sum(name.startswith("embed.") for name in weights["split"])
        assert len({id(weight) for weight in deferred}) == 2 * (linear - embeddings), "on both members"


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("positions", get_args(Positions))
def test_any_positions(positions, sequence):
    model = replace(TINY, positions=positions, seq=8, layers=2, attention="materialised")
    agrees(team_of(2, model=model, data=longer, sequence_parallel=sequence, steps=2))


@pytest.mark.sampled
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
def test_recomputing_changes_no_bit(sequence):
    weights, model = [], replace(TINY, seq=8, attention="materialised")
    for recompute in ("none", "full", "selective", ("none", "selective", "full")):
        team = team_of(2, pp=2, model=model, data=longer, recompute=recompute, sequence_parallel=sequence)
        team.step(0)
        weights.append(team.weights())
    for other in weights[1:]:
        assert all(torch.equal(weight, other[name]) for name, weight in weights[0].items())


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "interleaved"])
def test_every_schedule(schedule):
    agrees(team_of(2, pp=2, m=4, model=replace(TINY, layers=4), schedule=schedule, steps=2))


@pytest.mark.parametrize("tp", [2, 4])
def test_the_initial_weights_are_those_of_every_layout(tp):
    wanted = train_plainly(replace(team_of(1).run, steps=0)).weights
    found = team_of(tp, pp=2).weights()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in found.items())


def test_an_actor_holds_its_part_of_divided_weights_only():
    alone, team = team_of(1), team_of(4)
    (whole,) = [actor.held().now["weights"] for actor in alone.all]
    parts = [actor.held().now["weights"] for actor in team.all]
    replicated = sum(
        4 * actor.parameter(name).numel()
        for actor in team.all[:1]
        for name, cut in actor.holds().items()
        if cut.is_whole
    )
    assert sum(part - replicated for part in parts) == whole - replicated
    assert max(parts) < 0.45 * whole
    assert all(
        parameter.untyped_storage().nbytes() == 4 * parameter.numel() for parameter in team.all[1].parameters().values()
    )


@pytest.mark.sampled
@pytest.mark.parametrize("vocab", [4, 5, 11, 12])
def test_a_vocabulary_of_any_size(vocab):
    """Nothing is padded: shares differ by one."""

    def data(step, microbatch, dp):
        ids, labels = tokens(step, microbatch, dp)
        return ids % vocab, torch.where(labels < 0, labels, labels % vocab)

    agrees(team_of(4, model=replace(TINY, vocab=vocab), data=data, steps=2))


def test_an_evaluation_is_reported_once():
    team, alone = team_of(4, dp=2), team_of(1, dp=2)
    ours, theirs = (losses_of(each.step(1, "evaluate")) for each in (team, alone))
    assert ours[1] == theirs[1] == [12, 12, 11, 11]
    assert ours[0] == pytest.approx(theirs[0], rel=LOSS)


def test_a_step_sends_what_the_textbook_says():
    """Two all_reduces forward and two backward a layer, of b*s*h elements; the embedding's one and the head's one back;
    three of the loss, a number a token; and the norm and the vote."""
    tp, m, layers, tokens_of, width = 4, 2, 3, 2 * 6, 16
    team = team_of(tp, m=m, data=lambda *place: [values.abs() % 11 for values in tokens(*place)])
    team.step(0)
    ring = 2 * (tp - 1) / tp
    calls = m * (4 * layers + 2 + 3) + 1
    wide = m * (4 * layers + 2) * tokens_of * width * 4
    small = m * 3 * tokens_of * 4 + 2 * 21 * 8  # the norm is two exact sums
    assert team.ledger("tp") == [{"all_reduce": (calls, int(ring * (wide + small)))}] * tp


def test_along_the_sequence_as_many_bytes_are_sent():
    """Two all_gathers and two reduce_scatters forward and backward a layer; besides, once, the replicated gradients."""
    tp, m, wide = 4, 2, 2 * 8 * 16 * 4  # bytes of b*s*h
    fields = {"model": replace(TINY, seq=8), "data": lambda *place: [values.abs() % 11 for values in longer(*place)]}
    teams = [team_of(tp, pp=2, m=m, sequence_parallel=sequence, **fields) for sequence in (False, True)]
    plain, divided = [team.step(0) and team.ledger("tp") for team in teams]
    worker = teams[1].workers[0]
    replicated = sum(4 * worker.parameter(name).numel() for name, cut in worker.holds().items() if cut.is_whole)
    total, before = (sum(count for _, count in table[0].values()) for table in (divided, plain))
    assert total - before == 2 * (tp - 1) * replicated // tp
    calls, each = (
        m * (2 * 2 * 2 + 1),
        (tp - 1) * wide // tp,
    )  # two blocks; the embedding's reduce_scatter goes back, too
    assert divided[0]["all_gather"] == divided[0]["reduce_scatter"] == (calls, calls * each)
    assert [team.ledger("pp")[0]["send"][1] for team in teams] == [m * wide, m * wide // tp]


def test_selective_gathers_the_inputs_of_attention_and_mlp_once_more():
    fields = {"model": replace(TINY, seq=8), "data": longer, "sequence_parallel": True}
    teams = [team_of(2, recompute=recompute, **fields) for recompute in ("none", "selective")]
    plain, again = [team.step(0) and team.ledger("tp")[0] for team in teams]
    calls, size = plain.pop("all_gather")
    more = 2 * (2 * 3 + 1)  # of two microbatches: two a block, and the head's
    assert again.pop("all_gather") == (calls + more, size + more * 2 * 8 * 16 * 4 // 2)
    assert again == plain


LAYOUTS = {"alone": (1, 1, 1, 0), "tp=2": (2, 1, 1, 0), "tp=4": (4, 1, 1, 0), "all": (2, 2, 2, 0), "zero": (2, 2, 2, 1)}


@pytest.mark.sampled
@pytest.mark.parametrize(("here", "there"), [*pairwise([*LAYOUTS, "alone"]), ("all", "all"), ("all", "tp=2")])
def test_every_layout_reads_what_another_has_written(here, there, tmp_path):
    """Weights and what the optimizer keeps, bit by bit: written anew it is the same logical tensors."""

    def team(layout, m):
        tp, pp, dp, zero = LAYOUTS[layout]
        return team_of(tp, pp, dp, m // dp, model=replace(TINY, tied=True), zero=zero)

    first, second = team(here, 2), team(there, 2)
    first.step(0)
    written = read(first, tmp_path / "a")
    read(loaded(second, tmp_path / "a", written[1]), tmp_path / "b")
    again = read(second, tmp_path / "b")
    assert written[0].keys() == again[0].keys()
    assert all(torch.equal(tensor, again[0][name]) for name, tensor in written[0].items())


@pytest.mark.parametrize("op", [Op.F, Op.B])
def test_a_member_that_is_gone_is_told_by_the_action_that_waits_for_it(op):
    team = team_of(2)
    _, gone = team.all
    perform = gone.member._methods[op]

    def leave(action):
        gone.abort()
        perform(action)

    gone.member._methods[op] = leave
    for rank, error in enumerate(team.each(lambda actor: actor.train(0))):
        assert isinstance(error, ActionError)
        assert error.secondary
        assert str(error).startswith(f"actor pp=0 tp={rank}: action 0{op.value}0")
