"""Layers that are wrong on purpose: verify names the first tensor that is, and why. On threads, without Ray."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

import raypar as rp
from raypar.actors.collective.autograd import all_gather, copy_to, reduce_from, reduce_scatter
from raypar.actors.context_parallel import cores as context_model
from raypar.actors.data.batches import TokenMean
from raypar.actors.data_parallel.reducer import Reducer
from raypar.actors.inspect.activations import OutputWatch
from raypar.actors.models.parallel_style import Applied
from raypar.actors.optim.step import Updater
from raypar.actors.tensor_parallel import megatron
from raypar.actors.tensor_parallel import sequence as gathered
from raypar.actors.tensor_parallel.linear import RowParallelLinear
from raypar.parity.verify import verify
from tests.support.tensor_teams import TINY, longer
from tests.support.thread_jobs import TeamJob

MODEL = replace(TINY, seq=8, layers=2)


@pytest.fixture
def found():
    """What verify says of a run on threads."""
    jobs = []

    def verdict(tp=2, pp=1, dp=1, cp=1, **changes):
        fields = {"model": MODEL, "data": rp.Batches(longer), "optim": rp.AdamW(lr=1e-2), "clip": 0.5, "steps": 3}
        fields |= {"mesh": rp.Mesh(pp=pp, dp=dp, cp=cp, tp=tp), "microbatches": 2, "timeout": 10.0}
        run = rp.Run(**fields | changes)
        jobs.append(TeamJob(run))
        return verify(run, jobs[-1])

    yield verdict
    for job in jobs:
        job.close()


@pytest.fixture
def sabotaged(monkeypatch):
    """Let tensor parallelism enter, or leave, in another way; each is a function of what goes through and a group."""

    def sabotage(enter=None, leave=None):
        if enter is not None:
            monkeypatch.setattr(megatron, "copy_to", enter)
            monkeypatch.setattr(gathered, "all_gather", lambda x, group, dim: enter(x, group))
        if leave is not None:
            monkeypatch.setattr(megatron, "reduce_from", lambda x, group, in_place: leave(x, group))
            monkeypatch.setattr(megatron, "reduce_scatter", lambda x, group, dim: leave(x, group))

    return sabotage


def untouched(x, group):
    return x.view_as(x)


EMBEDDED = "output of embed.tokens in microbatch 0, forward"
BACK = "gradient at output of blocks.1 in microbatch 0, backward"
PART = "part of a sum: an all_reduce over tp is missing"
REDUCED = "tp times the right one: equal on all of tp, and yet summed over tp: reduced twice"
WRONG = {
    "leave does not sum": ({"leave": untouched}, EMBEDDED, PART),
    "enter does not sum back": ({"enter": untouched}, BACK, PART),
    "enter detaches": ({"enter": lambda x, group: x.detach()}, BACK, "the graph is cut after this layer"),
    "leave sums twice": (
        {"leave": lambda x, group: reduce_from(reduce_from(x, group), group)},
        EMBEDDED,
        "tp times the right one: summed over tp once too often",
    ),
    "leave averages": ({"leave": lambda x, group: reduce_from(x, group) / 2}, EMBEDDED, "1/tp times the right one"),
    "enter sums back twice": ({"enter": lambda x, group: copy_to(copy_to(x, group), group)}, BACK, REDUCED),
}

LAYOUTS = [{"pp": 2, "recompute": "full"}, {"recompute": ("full", "none")}]
CASES = [(wrong, {}) for wrong in WRONG] + [(wrong, layout) for wrong in list(WRONG)[:2] for layout in LAYOUTS]


@pytest.mark.sampled
@pytest.mark.parametrize(("wrong", "layout"), CASES, ids=str)
def test_a_wrong_move_is_found(found, sabotaged, wrong, layout):
    moves, place, cause = WRONG[wrong]
    sabotaged(**moves)
    verdict = found(**layout)
    assert not verdict.ok
    assert verdict.diagnosis.steps == (0,)
    assert verdict.diagnosis.place == place
    assert cause in verdict.diagnosis.cause
    assert str(verdict).splitlines()[1].startswith(f"begins with: {place}, in step 1: ")


def test_a_gather_in_the_wrong_order(found, sabotaged):
    sabotaged(enter=lambda x, group: all_gather(x, group, 1).roll(x.shape[1], 1))
    diagnosis = found(sequence_parallel=True).diagnosis
    assert diagnosis.place == "output of head.out in microbatch 0, forward"
    assert diagnosis.cause == "the 2 parts of dim 1 are in the order 1, 0: a gather in the wrong order"


@pytest.mark.long
def test_parts_of_the_sequence_that_are_swapped(found, sabotaged):
    sabotaged(leave=lambda x, group: reduce_scatter(x.roll(x.shape[1] // 2, 1), group, 1))
    diagnosis = found(sequence_parallel=True, pp=2).diagnosis
    assert diagnosis.place == EMBEDDED
    assert diagnosis.cause == "pp=0 tp=0 has the part of pp=0 tp=1: a gather or scatter in the wrong order"


def test_a_bias_in_every_part_of_the_sum(found, monkeypatch):
    """It is 0 in step 0, and there all is right."""

    def forward(self, x):
        return self.leave(nn.functional.linear(x, self.weight, self.bias))

    monkeypatch.setattr(RowParallelLinear, "forward", forward)
    diagnosis = found().diagnosis
    assert diagnosis.steps == (0, 1)
    assert diagnosis.place == "output of blocks.0.attn.out in microbatch 0, forward"
    assert diagnosis.cause == "blocks.0.attn.out.bias is added 2 times"


@pytest.mark.parametrize("axis", ["dp", "cp"])
def test_replicas_that_do_not_reduce(found, monkeypatch, axis):
    for method in ("finish", "hand_over"):
        monkeypatch.setattr(Reducer, method, lambda self: None)
    diagnosis = found(tp=1, **{axis: 2}, steps=1, zero=0).diagnosis
    assert diagnosis.place == "gradient of embed.tokens.weight"
    assert diagnosis.cause.startswith(f"each member of {axis} has its own part of a sum: not reduced over {axis}")


@pytest.mark.long
def test_tokens_in_the_wrong_places(found, monkeypatch):
    """The first layer that looks at more than one token is named."""
    monkeypatch.setattr(context_model.ContextAttention, "apply", lambda style, name, module: Applied(module))
    diagnosis = found(tp=1, cp=2, pp=2).diagnosis
    assert diagnosis.place == "output of blocks.0 in microbatch 0, forward"


class Summed(TokenMean):
    """Of all replicas' losses the sum, and not the mean."""

    def weight(self, count, scale=1.0):
        return super().weight(count, scale) * self._num_dp


def test_a_loss_that_is_not_averaged(found, monkeypatch):
    monkeypatch.setattr("raypar.actors.worker.build.assemble.TokenMean", Summed)
    diagnosis = found(tp=1, dp=2, microbatches=3).diagnosis
    assert diagnosis.place == "gradient at the loss in microbatch 0, backward"
    assert diagnosis.cause == "dp times the right one: summed over dp, and not averaged"


@pytest.mark.long
def test_gradients_that_are_wrong_behind_the_layers(found, monkeypatch):
    """Partial gradients of norms, with the sequence divided, that nobody sums up."""
    monkeypatch.setattr(
        "raypar.actors.tensor_parallel.gradients.ShardedGradients.complete", lambda self, parameters: None
    )
    diagnosis = found(sequence_parallel=True).diagnosis
    assert diagnosis.place == "gradient of embed.positions.weight"
    assert diagnosis.cause.startswith("each member of tp has its own part of a sum")


class OfSomeTokens(OutputWatch):
    """Where the loss that an actor has is not the whole one."""

    def __init__(self, layers, outputs, *, keeps_loss):
        super().__init__(layers, outputs)


@pytest.mark.parametrize("kind", [OutputWatch, OfSomeTokens])
def test_an_update_that_is_wrong(found, monkeypatch, kind):
    """No layer is: the diagnosis says so."""
    monkeypatch.setattr("raypar.actors.worker.probe.OutputWatch", kind)
    step = Updater.step

    def stale(self, number, ballot):
        self.run = replace(self.run, clip=None)
        return step(self, number, ballot)

    monkeypatch.setattr(Updater, "step", stale)
    verdict = found(optim=rp.SGD(lr=1.0), steps=1, clip=1e-3)
    assert not verdict.ok
    assert str(verdict.diagnosis).startswith("layer by layer nothing differs in step 1: look at the update")


def test_a_run_that_is_right_is_not_watched(found, monkeypatch):
    monkeypatch.setattr("raypar.actors.worker.probe.OutputWatch", None)
    assert found(dp=2).diagnosis is None
    assert found(tp=1, pp=2).bitwise
