"""What a block keeps by the formulas of activations beside what it really keeps, for drawn configurations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.run import Run
from raypar.planner.memory.activations import stage_activations
from tests.support.counted import threads
from tests.support.kept_activations import block_of, kept

NEAR = 0.005
CHOICES = {"softmax": None, "sigmoid": None, "shazeer": None, "switch": 1}  # but for gshard, which drops some by chance


@st.composite
def experts(draw):
    gate = draw(st.sampled_from([*CHOICES]))
    return MoE(
        experts=draw(st.integers(3, 6)),
        top_k=CHOICES[gate] or draw(st.integers(1, 3)),
        gate=gate,
        noise=draw(st.sampled_from([0.0, 0.1])) if gate == "switch" else 0.0,
        loss=draw(st.sampled_from(["switch", "gshard", "none"])),
        z_loss=draw(st.sampled_from([0.0, 0.1])),
        width=draw(st.sampled_from([None, 40])),
        shared=draw(st.integers(0, 1)),
        residual=draw(st.booleans()),
    )


@st.composite
def configurations(draw):
    """A run of one microbatch, whose scores are materialised, on three stages of a block each."""
    kind, heads = draw(st.sampled_from([GPT, Llama])), draw(st.sampled_from([2, 4]))
    width, seq = draw(st.sampled_from([8, 12])), draw(st.integers(20, 70))
    more = {
        "mlp": draw(st.integers(1, 4)) if kind is GPT else None,
        "kv_heads": draw(st.sampled_from([None, 1])) if kind is Llama else None,
        "qk_norm": draw(st.booleans()) if kind is Llama else None,
        "post_norms": draw(st.booleans()) if kind is Llama else None,
        "attention_cap": draw(st.sampled_from([None, 9.0])) if kind is Llama else None,
        "head_width": draw(st.sampled_from([None, 16])) if kind is Llama else None,
        "positions": draw(st.sampled_from(["learned", "rope", "alibi"])),
        "window": draw(st.sampled_from([None, 9])),
        "qkv_bias": draw(st.booleans()),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
        "moe": draw(st.one_of(st.none(), experts())),
    }
    given_ = {name: value for name, value in more.items() if value is not None}
    sizes = {"layers": 3, "hidden": heads * width, "heads": heads, "seq": seq, "vocab": 7}
    model = kind(**sizes, **given_, attention="materialised")
    word = draw(st.sampled_from(["none", "selective"]))
    return Run(
        model=model, mesh=Mesh(pp=3), schedule="naive", microbatches=1, micro_batch_size=draw(st.integers(1, 4)),
        recompute=(word,) * 3,
    )  # fmt: skip


@pytest.mark.long
@seed(34)
@settings(max_examples=30, database=None)
@given(run=configurations())
def test_what_a_block_keeps_is_counted_within_half_a_percent(run):
    model = run.model
    stage, x, _ = block_of(replace(model, layers=1), run.micro_batch_size, recompute=run.recompute[:1])
    said = stage_activations(run, model, range(1, 2), model.layers).kept
    angles = 8 * model.seq * model.head_size if model.positions == "rope" else 0  # all blocks share them
    with threads(1):
        assert said + angles == pytest.approx(4 * kept(stage, x), rel=NEAR)
