"""What a block keeps for its backward, counted, against sbh(34 + 5as/h) (Korthikanti et al. 2022, equation 2).

The paper counts bytes: two for a number, one for an element of a dropout's mask. Of a block's 34 sbh bytes 32 are 16
numbers for each of sbh, and 2 are 2 masks; of 5 as^2b bytes 4 are 2 numbers (softmax, and what dropout left of it) and
1 is a mask. On CPUs torch keeps masks as float32 like everything else, so here all are elements of 4 bytes: 18 sbh and
3 as^2b. Without dropout there are no masks, and the softmax is kept once: 16 sbh and as^2b.
"""

from __future__ import annotations

import pytest
import torch

from raypar.actors.context_parallel.cores import context_styles
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.models.build import build_model
from raypar.actors.models.skip_connections import NO_SKIPS
from raypar.actors.pipeline.stage import Stage
from raypar.actors.pipeline.stage_ends import StageEnds
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.tensor_parallel.megatron import megatron_styles
from raypar.actors.worker.build.parallelize import Parallelizer
from tests.support.kept_activations import (  # noqa: F401  (fixtures that hold for every test)
    ASSB,
    SBH,
    A,
    B,
    H,
    S,
    block,
    hooks_inside_count_too,
    kept,
    one_thread,
)
from tests.support.local_groups import local_groups
from tests.support.threads import in_threads


@pytest.mark.parametrize("positions", ["learned", "rope", "alibi"])
@pytest.mark.parametrize(
    ("recompute", "dropout", "wanted"),
    [
        ("none", 0.1, 18 * SBH + 3 * ASSB),
        ("selective", 0.1, 18 * SBH),
        ("full", 0.1, SBH),
        ("none", 0.0, 16 * SBH + ASSB),
        ("selective", 0.0, 16 * SBH),
        ("full", 0.0, SBH),
    ],
)
def test_a_block_keeps_what_the_formula_says(recompute, dropout, wanted, positions):
    stage, x, _ = block(recompute=(recompute,), dropout=dropout, positions=positions)
    assert kept(stage, x) == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("sequence", "whole"), [(False, 4), (True, 2)], ids=["", "sequence"])
@pytest.mark.parametrize("tp", [2, 4])
def test_of_a_divided_block_each_member_keeps_its_part(tp, sequence, whole, dropout):
    """Whole are the inputs of norms, attention and MLP, and the masks behind those two; along the sequence only the
    inputs of attention and MLP, which are kept as they were gathered."""

    def one(group):
        stage, x, _ = block(styles=megatron_styles(group, sequence=sequence), dropout=dropout)
        return kept(stage, x.chunk(tp, 1)[group.rank].contiguous() if sequence else x)

    masks, scores = (2, 3) if dropout else (0, 1)
    whole += masks if not sequence else 0
    wanted = (whole + (16 + masks - whole) / tp) * SBH + scores * ASSB / tp
    for found in in_threads(local_groups("tp", tp), one):
        assert found == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("context", ["ring", "all_gather", "ulysses", "rsa"])
@pytest.mark.parametrize("cp", [2, 4])
def test_of_divided_sequences_each_member_keeps_its_part(cp, context):
    """With rsa rows of scores too; with ulysses the output of all tokens, and what of it comes back."""

    def one(group):
        model = build_model(GPT(layers=1, hidden=H, heads=A, seq=S, vocab=7), 0)
        parallelizer = Parallelizer(model, [context_styles(context, group)])
        made = model.materialize([1], 0, parallelizer.parallelize)
        ends = StageEnds(NO_SKIPS, takes_data=False)
        stage = Stage(model, [1], made, ComputeDevice(), ends, is_last=False, recompute="none", seed=0)
        stage.begin(train=True)
        return kept(stage, torch.randn(B, S // cp, H))

    wanted = (16 * SBH + {"rsa": ASSB, "ulysses": SBH}.get(context, 0)) / cp
    for found in in_threads(local_groups("cp", cp), one):
        assert found == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("tp", [2, 4])
def test_selective_along_the_sequence_each_member_keeps_its_part_of_everything(tp):
    """34 sbh / t, in the paper's bytes: inputs of attention and MLP are gathered anew."""

    def one(group):
        stage, x, _ = block(recompute=("selective",), styles=megatron_styles(group, sequence=True), dropout=0.1)
        return kept(stage, x.chunk(tp, 1)[group.rank].contiguous())

    for found in in_threads(local_groups("tp", tp), one):
        assert found == pytest.approx(18 * SBH / tp, rel=0.05)


def test_the_kernel_keeps_no_scores_so_selective_is_free_there():
    """torch's kernel for CPUs computes the scores again, as FlashAttention does; it has no dropout, so with it torch
    falls back on ops that keep them."""
    none, selective = (kept(*block(recompute=(word,), attention="fused")[:2]) for word in ("none", "selective"))
    assert none == selective == pytest.approx(16 * SBH, rel=0.05)
    none, selective = (kept(*block(recompute=(w,), attention="fused", dropout=0.1)[:2]) for w in ("none", "selective"))
    assert none > 18 * SBH + 2 * ASSB
    assert selective == pytest.approx(18 * SBH, rel=0.05)


def test_shared_keys_and_values_are_kept_once():
    every, two, one = (kept(*block(Llama, kv_heads=heads, recompute=("selective",))[:2]) for heads in (A, 2, 1))
    assert every - two == pytest.approx(SBH, rel=0.01)
    assert every - one == pytest.approx(1.5 * SBH, rel=0.01)


@pytest.mark.sampled
@pytest.mark.parametrize("attention", ["fused", "materialised"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("positions", ["learned", "rope", "alibi"])
@pytest.mark.parametrize("kind", [GPT, Llama])
def test_whatever_is_run_again_has_the_same_bits(kind, positions, dropout, attention):
    outcomes = []
    for recompute in ("none", "selective", "full", ("selective",), ("full",)):
        stage, x, gradient = block(kind, recompute, positions=positions, dropout=dropout, attention=attention)
        for microbatch in range(2):
            outputs = stage.forward(3, microbatch, (x,), ())
            torch.rand(3)  # others draw in between
            back = stage.backward(3, microbatch, (gradient,))
        outcomes.append((*outputs, *back, *(p.grad for p in stage.parameters().values())))
    assert all(value.abs().max() > 0 for value in outcomes[0])
    for outcome in outcomes[1:]:
        assert all(torch.equal(one, other) for one, other in zip(outcome, outcomes[0], strict=True))
