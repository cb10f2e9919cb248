"""Gradients in half precision are added into fp32, with the same bits whether each is cast first or not."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import raypar as rp
from raypar.actors.models.build import build_model
from raypar.actors.models.init.cast import cast, cast_gradients
from tests.support.team import Team

SIZES = {"layers": 2, "hidden": 16, "heads": 4, "seq": 8, "vocab": 256}
MODELS = {
    "gpt": rp.GPT(**SIZES),
    "llama": rp.Llama(kv_heads=2, qk_norm=True, post_norms=True, qkv_bias=True, **SIZES),
    "lora": rp.Llama(lora=rp.Lora(rank=2), **SIZES),
    "capped": rp.Llama(attention="materialised", attention_cap=5.0, positions="alibi", window=3, **SIZES),
    "experts": rp.GPT(moe=rp.MoE(experts=2, shared=1, every=2, first=1), **SIZES),
}
LAYOUTS = {
    "one": {},
    "tp": {"mesh": rp.Mesh(tp=2)},
    "sequence": {"mesh": rp.Mesh(tp=2), "sequence_parallel": True},
    "ring": {"mesh": rp.Mesh(cp=2)},
    "grid": {"mesh": rp.Mesh(tp="2d:2x2")},
    "zero 3": {"mesh": rp.Mesh(dp=2), "zero": 3},
}


def uses(root):
    """How often a graph uses each leaf."""
    found, seen, waiting = Counter(), set(), [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        children = [child for child, _ in node.next_functions if child is not None]
        found.update(child.variable for child in children if hasattr(child, "variable"))
        waiting += children
    return found


def uses_of(run):
    """How often the first forward of the first actor uses each parameter whose gradients are not cast."""
    team = Team.of(run)

    def forward(actor):
        actor.start_step(0, 0)
        for action in team.programs["train"].rows[team.world.row(team.all.index(actor))]:
            actor.act(action)
            if str(action) == "0F0":
                break
        ((_, end, _, _),) = actor.stages[0]._saved.values()
        counts = uses(end._root.grad_fn)
        return {name: counts[one] for name, one in actor.stages[0].parameters().items() if one.grad_dtype is None}

    found = team.each(forward)[0]
    assert isinstance(found, dict), found
    return found


@pytest.mark.parametrize(
    ("model", "layout"),
    [*((model, "one") for model in MODELS), *(("llama", layout) for layout in LAYOUTS if layout != "one")],
)
def test_what_is_not_cast_is_used_once(model, layout):
    more = {"microbatches": 1, "micro_batch_size": 2, "precision": rp.Precision("bf16"), "timeout": 20.0}
    found = uses_of(rp.Run(model=MODELS[model], **more, **LAYOUTS[layout]))
    assert {*found.values()} == {1}
    assert {name.partition(".attn.")[0] for name in found} >= {"blocks.0"}
    assert not any("experts" in name or "router" in name for name in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [rp.GPT, rp.Llama])
def test_gradients_have_the_bits_of_those_that_are_cast_first(kind, dtype):
    found = []
    for uses_once in (True, False):
        (block,) = build_model(kind(**SIZES), 0).materialize([1], 0)
        block.uses_once = uses_once
        cast([block], dtype, torch.float32)
        for microbatch in range(3):
            x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(microbatch)).to(dtype)
            block(x).backward(x)
            cast_gradients([*block.parameters()])
        found.append([parameter.grad for parameter in block.parameters()])
    for one, wanted in zip(*found, strict=True):
        assert torch.equal(one, wanted)
        assert one.dtype == torch.float32


def test_gradients_that_are_added_up_in_half_precision_stay_there():
    (block,) = build_model(rp.GPT(**SIZES), 0).materialize([1], 0)
    cast([block], torch.bfloat16, torch.bfloat16)
    x = torch.ones(1, 8, 16, dtype=torch.bfloat16)
    block(x).backward(x)
    cast_gradients([*block.parameters()])
    assert {one.grad.dtype for one in block.parameters()} == {torch.bfloat16}
