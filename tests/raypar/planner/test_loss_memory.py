"""The memory of logits and losses by the formulas beside what a head really keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.autograd.profiler import profile

import raypar as rp
from raypar.actors.layers.linear import TORCH, anywhere
from raypar.actors.layers.linear_cross_entropy import LossSpec, Vocabulary, linear_cross_entropy
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.models.build import build_model
from raypar.actors.models.skip_connections import NO_SKIPS
from raypar.actors.pipeline.stage import Stage
from raypar.actors.pipeline.stage_ends import StageEnds
from raypar.actors.specs import model as model_specs
from raypar.planner.hardware.data_sheets import DEVICES
from raypar.planner.memory.activations import loss_slice, stage_activations
from raypar.planner.timing.messages import Messages
from raypar.planner.timing.stages import stages_of
from tests.support.kept_activations import kept

VOCAB, TOKENS = 2000, 64
LLAMA_8B = rp.Llama(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14_336, seq=8192, vocab=128_256)


def run_of(model, **changes):
    return rp.Run(model=model, microbatches=1, micro_batch_size=1, **changes)


def head_of(run):
    """What the formulas say of a head alone."""
    with_head, without = (stage_activations(run, run.model, range(n, n + 1), 2) for n in (1, 0))
    return with_head.kept - without.kept, with_head.passing


@pytest.mark.parametrize("cap", [None, 4.0])
@pytest.mark.parametrize("ids", [None, 250])
def test_what_a_head_keeps_is_counted_within_half_a_percent(ids, cap, monkeypatch):
    if ids is not None:
        monkeypatch.setattr(model_specs, "_SLICE_LOGITS", ids * TOKENS)
        monkeypatch.setattr(model_specs, "_SLICE_STEP", 1)
    run = run_of(rp.Llama(layers=2, hidden=16, heads=2, seq=TOKENS, vocab=VOCAB, logit_cap=cap))
    assert loss_slice(run, run.model) == ids
    model = build_model(run.model, 0)
    ends = StageEnds(NO_SKIPS, takes_data=False)
    stage = Stage(model, [3], model.materialize([3], 0), ComputeDevice(), ends, is_last=True, recompute="none", seed=0)
    stage.begin(train=True)
    x, labels = torch.randn(1, TOKENS, 16), torch.randint(VOCAB, (1, TOKENS))
    found = 4 * kept(stage, x, (labels,)) - labels.nbytes
    assert head_of(run)[0] == pytest.approx(found, rel=0.005, abs=64)


def most_allocated(work):
    """The most bytes that a call has allocated at a time, beside what there was."""
    with profile(profile_memory=True) as found:
        work()
    now = most = 0
    for event in found.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.parametrize("cap", [None, 4.0])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_a_slice_needs_is_counted_within_a_twentieth(precision, cap, monkeypatch):
    tokens, ids, hidden = 512, 512, 4
    monkeypatch.setattr(model_specs, "_SLICE_LOGITS", ids * tokens)
    model = rp.Llama(layers=2, hidden=hidden, heads=1, seq=tokens, vocab=VOCAB, logit_cap=cap)
    run = run_of(model, precision=rp.Precision(precision))
    dtype = torch.bfloat16 if run.precision.is_half else torch.float32
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    weight, labels = torch.randn(VOCAB, hidden, dtype=dtype), torch.randint(VOCAB, (tokens,))
    spec = LossSpec(Vocabulary(VOCAB), loss_slice(run, model), -100, cap, TORCH, anywhere)
    most = most_allocated(lambda: linear_cross_entropy(x, weight, labels, spec).sum().backward())
    assert most == pytest.approx(head_of(run)[1], rel=0.05)


def test_the_logits_of_a_llama_8b_are_those_of_a_slice():
    """Whole they would be 4 GiB of a sequence in fp32, and as many of their gradient."""
    run = run_of(LLAMA_8B, precision=rp.Precision("bf16"))
    whole = stage_activations(replace(run, tile={"head.out": 2}), LLAMA_8B, range(31, 32), 32)
    sliced = stage_activations(run, LLAMA_8B, range(31, 32), 32)
    logits = 8192 * 128_256
    assert whole.kept - sliced.kept == 4 * logits - 4 * 8192
    assert whole.passing == 6 * logits
    assert sliced.passing == 6 * 8192 * 8192 + 4 * 8192 * 4096
    for tp in (2, 8):
        assert loss_slice(replace(run, mesh=rp.Mesh(tp=tp)), LLAMA_8B) == 8192, "the same on every layout"


def test_a_backward_makes_the_logits_again_and_leaves_no_gradient_of_the_head_for_w():
    run = run_of(LLAMA_8B, precision=rp.Precision("bf16"))
    silent = Messages(tensor=0.0, context=0.0, hides=False, experts=0.0, border=0.0)
    sliced, whole = (
        stages_of(run, LLAMA_8B, DEVICES["h100"], silent, 2, slices_loss=slices)[1] for slices in (True, False)
    )
    product = 2 * 8192 * 4096 * 128_256 / DEVICES["h100"].half
    assert sliced.forward == whole.forward
    assert sliced.again > product
    assert whole.weights - sliced.weights > product
    assert sliced.b == pytest.approx(whole.b + sliced.again)
