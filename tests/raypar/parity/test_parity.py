"""The layout computes what one plain process computes: bitwise where the additions happen in the same order."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.parity.verify import relative_error, train_plainly
from raypar.schedules.catalog import build
from raypar.schedules.schedule import Schedule
from tests.support.layouts import verdict_of
from tests.support.plain import trained, trained_with_own_dice
from tests.support.thinned import thinned

STEPS = 3
STEPS_ON_ACTORS = 5
MICROBATCHES = (1, 2, 4, 8)

pytestmark = pytest.mark.usefixtures("plain_once")


def tiny(pp, **changes):
    run = rp.recipe("gpt-tiny")
    assert run.model.dropout > 0
    assert run.clip is not None
    assert isinstance(run.optim, rp.AdamW)
    text = rp.Text(argparse.__file__)  # opened by every actor for every run: one file and not the whole library
    return replace(run, **{"mesh": rp.Mesh(pp=pp), "steps": STEPS, "data": text} | changes)


def allowed(schedule, pp):
    for m in MICROBATCHES:
        try:
            build(schedule, pp, m)
        except ValueError:
            continue
        yield m


CASES = [
    (pp, schedule, m)
    for pp in (1, 2, 3, 4)
    for schedule in ("naive", "gpipe", "1f1b", "interleaved")
    for m in allowed(schedule, pp)
    if schedule != "naive" or m == 4
]
SPLIT = [
    (pp, schedule, 4) for pp in (1, 2, 3, 4) for schedule in ("zb-h1", "zb-h2", "zb-2p", "zb-v", "v-half", "v-min")
]
CHUNKED = [
    (pp, schedule, m + pp % 2)
    for schedule, m in (("looped-bfs", 2), ("zb-interleaved", 5), ("dualpipe-v", 7))
    for pp in (2, 3)
]
LLAMAS = [(1, "1f1b"), (2, "gpipe"), (2, "interleaved"), (3, "1f1b"), (4, "1f1b"), (4, "interleaved")]
ON_ACTORS = [  # the other layouts have threads for actors
    ("gpt-tiny", 1, "1f1b", 2),
    ("gpt-tiny", 2, "naive", 4),
    ("gpt-tiny", 2, "gpipe", 8),
    ("gpt-tiny", 2, "1f1b", 8),
    ("gpt-tiny", 2, "interleaved", 4),
    ("gpt-tiny", 3, "1f1b", 4),
    ("gpt-tiny", 4, "1f1b", 8),
    ("gpt-tiny", 4, "interleaved", 8),
    ("gpt-tiny", 2, "zb-v", 4),
    ("gpt-tiny", 4, "zb-h2", 4),
    ("llama-tiny", 2, "interleaved", 4),
    ("llama-tiny", 4, "1f1b", 4),
]
MODELS = [("gpt-tiny", *case) for case in CASES + SPLIT + CHUNKED] + [("llama-tiny", *case, 4) for case in LLAMAS]


def test_the_cases_cover_what_the_schedules_allow():
    assert len(CASES) == 52
    assert set(ON_ACTORS) < set(MODELS)
    assert {(pp, m) for pp, schedule, m in CASES if schedule == "1f1b"} == {
        (p, m) for p in (1, 2, 3, 4) for m in MICROBATCHES
    }


@pytest.mark.sampled
@pytest.mark.parametrize("pp", [2, 3])
def test_tied_embeddings(job_on, pp, tmp_path):
    run = tiny(pp)
    run = replace(run, model=replace(run.model, tied=True), folder=str(tmp_path / "left"))
    verdict = rp.verify(run, job_on(pp))
    assert verdict.worst <= 1e-6, str(verdict)
    assert not (tmp_path / "left").exists(), "a comparison leaves nothing behind"
    weights = {}
    for name, weight in job_on(pp).weights().items():
        assert torch.equal(weights.setdefault(name, weight), weight), f"the two ends of {name} drifted apart"


@pytest.mark.sampled
@pytest.mark.parametrize("positions", ["sinusoidal", "hierarchical", "rope", "alibi"])
def test_positions(job_on, positions):
    model = replace(tiny(2).model, layers=4, positions=positions, attention="materialised")
    verdict = rp.verify(tiny(2, model=model), job_on(2))
    assert verdict.bitwise, str(verdict)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "schedule", "m", "recompute"),
    [
        (rp.Mesh(pp=2), "1f1b", 2, "none"),
        (rp.Mesh(pp=2), "gpipe", 2, "full"),
        pytest.param(rp.Mesh(dp=2), "gpipe", 1, "none", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    ("linear", "attention"), thinned([("onednn", "blocks"), ("torch", "fused")], lambda linear, _: linear == "onednn")
)
def test_layers_large_enough_for_kernels_of_their_own(job_on, mesh, schedule, m, recompute, linear, attention):
    model = rp.GPT(layers=2, hidden=256, heads=8, seq=512, linear=linear, attention=attention)
    changes = {"model": model, "mesh": mesh, "micro_batch_size": 1, "microbatches": m, "recompute": recompute}
    verdict = rp.verify(tiny(2, **changes, schedule=schedule, steps=2), job_on(2))
    assert verdict.bitwise, str(verdict)


def mlp():
    return [nn.Linear(6, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 16)), nn.Linear(16, 3)]


def regression(step, microbatch, dp):
    generator = torch.Generator().manual_seed(step * 100 + microbatch)
    x = torch.randn(5, 6, generator=generator)
    return x, x[:, :3].sin()


def test_the_users_own_modules_and_loss(job_on):
    run = rp.Run(
        model=rp.Layers(mlp, loss=nn.functional.mse_loss),
        mesh=rp.Mesh(pp=3),
        schedule="gpipe",
        microbatches=4,
        data=rp.Batches(regression, validate=regression),
        optim=rp.SGD(lr=0.3),
        steps=STEPS,
    )
    job = job_on(3)
    verdict = rp.verify(run, job)
    assert verdict.bitwise, str(verdict)
    assert job.evaluate().loss < verdict.losses[0]
    assert set(job.parameters) == {
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.1.weight",
        "layers.1.1.bias",
        "layers.2.weight",
        "layers.2.bias",
    }


def is_bitwise(verdict, model, steps=STEPS):
    assert verdict.bitwise, str(verdict)
    assert verdict.steps == steps
    assert verdict.weights == {"gpt-tiny": 109, "llama-tiny": 75}[model]
    assert len(set(verdict.losses)) == steps, "a run whose loss never moves proves nothing"


def is_short(model, pp, schedule, m):
    """All schedules on two ranks, with one, two, four and eight microbatches, and some on one, three and four."""
    if pp == 2:
        return (schedule, m) not in (("gpipe", 2), ("1f1b", 4), ("interleaved", 2))
    return (model, schedule, m) == ("gpt-tiny", "1f1b", 4) or (pp, schedule, m) == (4, "interleaved", 8)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("model", "pp", "schedule", "m"),
    thinned(ON_ACTORS, lambda _, pp, schedule, m: (pp, schedule) in ((2, "1f1b"), (2, "zb-v"), (4, "interleaved"))),
)
def test_bitwise_equal_to_one_plain_process(job_on, model, pp, schedule, m):
    run = tiny(pp, model=rp.recipe(model).model, schedule=schedule, microbatches=m, steps=STEPS_ON_ACTORS)
    is_bitwise(rp.verify(run, job_on(pp)), model, STEPS_ON_ACTORS)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("model", "pp", "schedule", "m"), thinned([case for case in MODELS if case not in ON_ACTORS], is_short)
)
def test_bitwise_equal_to_one_plain_process_on_threads(monkeypatch, model, pp, schedule, m):
    monkeypatch.setattr("raypar.parity.verify.train_plainly", trained_with_own_dice)
    is_bitwise(verdict_of(tiny(pp, model=rp.recipe(model).model, schedule=schedule, microbatches=m)), model)


EITHER = "selective", "full", "none", "full", *["none"] * 4
RECOMPUTED = [(schedule, how) for schedule in ("gpipe", "1f1b", "interleaved") for how in ("full", "selective", EITHER)]
SOME = [("gpipe", "full"), ("1f1b", "selective"), ("interleaved", EITHER)]


@pytest.mark.sampled
@pytest.mark.parametrize(("schedule", "recompute"), thinned(RECOMPUTED, lambda *case: case in SOME))
def test_recomputing_changes_no_bit(job_on, schedule, recompute):
    verdict = rp.verify(tiny(2, schedule=schedule, recompute=recompute), job_on(2))
    assert verdict.bitwise, str(verdict)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_backwards_in_halves(job_on, recompute):
    """Each W waits for as long as it can: the activations of all microbatches are in flight, as in GPipe."""
    rows = ["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]
    schedule = Schedule.of("late weights", [row.split() for row in rows])
    verdict = rp.verify(tiny(2, schedule=schedule, microbatches=2, recompute=recompute), job_on(2))
    assert verdict.bitwise, str(verdict)
    assert job_on(2).step().in_flight == (2, 2)


@pytest.mark.parametrize(
    "rows",
    [
        ("0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1", "1F0 1F1 1B0 1B1"),
        ("0F0 0F1 1F0 3F0 3I0 1F1 3F1 3B1 1B0 0B0 3W0 1B1 0B1", "2F0 2F1 2B0 2B1"),
    ],
)
def test_ranks_may_hold_different_numbers_of_stages(monkeypatch, rows):
    monkeypatch.setattr("raypar.parity.verify.train_plainly", trained_with_own_dice)
    schedule = Schedule.of("uneven", [row.split() for row in rows])
    verdict = verdict_of(tiny(2, schedule=schedule, microbatches=2, steps=2))
    assert verdict.bitwise, str(verdict)


@pytest.mark.long
def test_a_v_that_is_searched_for(monkeypatch):
    monkeypatch.setattr("raypar.parity.verify.train_plainly", trained_with_own_dice)
    is_bitwise(verdict_of(tiny(2, schedule="zb-1p", chunks=2, microbatches=6)), "gpt-tiny")


@pytest.mark.long
def test_another_order_of_microbatches_is_another_order_of_additions(job_on):
    rows = ["0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0", "1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0"]
    schedule = Schedule.of("backwards", [row.split() for row in rows])
    optim = rp.AdamW(eps=1e-5)  # divided by the usual 1e-8, gradients that are mostly rounding would move weights
    verdict = rp.verify(tiny(2, schedule=schedule, microbatches=4, optim=optim), job_on(2))
    assert verdict.ok, str(verdict)
    assert not verdict.bitwise
    assert verdict.worst <= 1e-6


@pytest.mark.sampled
@pytest.mark.parametrize(
    "schedule", thinned(["naive", "gpipe", "1f1b", "interleaved", "zb-v"], lambda name: name in ("1f1b", "zb-v"))
)
def test_stepped_equals_compiled(job_on, schedule):
    job, run = job_on(2), tiny(2, schedule=schedule)
    job.reset(run)
    compiled = [job.step() for _ in range(3)]
    weights = dict(job.weights())
    job.reset(run)
    stepped = []
    for _ in range(3):
        stepper = job.stepper()
        stepper.next()
        stepper.run_to("1SEND_B0")
        stepped.append(stepper.finish())
    assert [(r.loss, r.grad_norm) for r in stepped] == [(r.loss, r.grad_norm) for r in compiled]
    assert all(torch.equal(weight, weights[name]) for name, weight in job.weights().items())


@pytest.mark.sampled
@pytest.mark.parametrize(("schedule", "bitwise"), [("1f1b", True), ("interleaved", False)])
def test_tied_embeddings_on_one_rank_are_one_parameter(job_on, schedule, bitwise):
    """In one stage autograd adds as one process does; in two, the head's gradient is added before the embedding's."""
    job, run = job_on(1), tiny(1, schedule=schedule)
    run = replace(run, model=replace(run.model, tied=True))
    verdict = rp.verify(run, job)
    assert verdict.bitwise == bitwise
    assert verdict.worst <= 1e-6, str(verdict)
    assert "head.out.weight" not in dict(job.weights())


@pytest.mark.long
def test_a_stage_of_its_own_moves_nothing(job_on):
    job = job_on(1)
    job.reset(tiny(1))
    job.step()
    assert job.ledger() == {"pp=0": {}}


@pytest.mark.sampled
@pytest.mark.parametrize(("pp", "schedule"), [(1, "1f1b"), (2, "1f1b"), (2, "interleaved"), (4, "1f1b")])
def test_the_layout_does_not_change_the_initial_weights(job_on, pp, schedule):
    run = tiny(pp, schedule=schedule)
    job_on(pp).reset(run)
    found, wanted = dict(job_on(pp).weights()), train_plainly(replace(run, steps=0)).weights
    assert found.keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in found.items())


@pytest.mark.sampled
@pytest.mark.parametrize("split", ["balanced", (1, 7), (5, 3)])
def test_any_split_of_the_layers(job_on, split):
    verdict = rp.verify(tiny(2, split=split), job_on(2))
    assert verdict.bitwise, str(verdict)


def test_batches_that_are_no_function_of_their_place_are_refused():
    data = rp.Batches(lambda *_: (torch.randn(5, 6), torch.ones(5, 3)))
    run = rp.Run(model=rp.Layers(mlp, nn.functional.mse_loss), data=data, mesh=rp.Mesh(pp=2))
    with pytest.raises(rp.ConfigError, match=r"data\.fn gives another batch when it is asked for the same one again"):
        rp.verify(run)


def test_replicas_with_the_same_samples_are_told(job_on, caplog):
    data = rp.Batches(lambda step, microbatch, dp: regression(step, microbatch, 0))
    run = rp.Run(model=rp.Layers(mlp, nn.functional.mse_loss), data=data, mesh=rp.Mesh(dp=2), microbatches=2, steps=2)
    assert rp.verify(run, job_on(2)).ok
    assert "data.fn gives replicas 0 and 1 the same samples" in caplog.text


def test_a_changed_weight_is_found(job_on, monkeypatch):
    """The comparison can fail: a plain process with another seed for dropout is not equal."""
    job, run = job_on(2), tiny(2)
    plain = trained(replace(run, seed=1))
    monkeypatch.setattr("raypar.parity.verify.train_plainly", lambda _: plain)
    verdict = rp.verify(run, job)
    assert not verdict.bitwise
    assert verdict.worst > 1e-3
    assert "loss of step 1" in str(verdict)


@pytest.mark.long
def test_sgd_without_clipping(job_on):
    verdict = rp.verify(tiny(2, optim=rp.SGD(lr=0.1, weight_decay=0.01), clip=None), job_on(2))
    assert verdict.bitwise, str(verdict)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("clip", [1e-2, 1e2])
def test_every_step_clipped_and_none(job_on, clip):
    run = tiny(2, clip=clip)
    job = job_on(2)
    verdict = rp.verify(run, job)
    assert verdict.bitwise, str(verdict)
    assert (job.step().grad_norm > clip) == (clip < 1)


def test_relative_error():
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(torch.tensor([0.5]), torch.tensor([0.0])) == 0.5
