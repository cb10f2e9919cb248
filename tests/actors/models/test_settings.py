"""What models of other people have beside ours is the same on every axis as in one plain process, on threads."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from raypar.actors.layers.attention.attention import Core
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.build import build_model
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.optim import AdamW
from raypar.config.run import Run
from tests.support.team import Team
from tests.support.tensor_teams import agrees

SIZES = {"layers": 2, "hidden": 16, "heads": 4, "seq": 8, "vocab": 13}
QWEN = Llama(
    **SIZES, kv_heads=2, ffn=12, head_width=6, qkv_bias=True, qk_norm=True, window=3, window_first=1, tied=True
)
GEMMA = Llama(
    **SIZES, kv_heads=2, ffn=12, head_width=6, gate="gelu_tanh", post_norms=True, scaled_embedding=True,
    query_scale=3.0, attention="materialised", attention_cap=1.5, logit_cap=2.0, window=3, window_skips=2, tied=True,
)  # fmt: skip
GPT2 = GPT(**SIZES, gelu="tanh", qkv_bias=True, positions="rope", norm_eps=1e-3)


def tokens(step, microbatch, dp):
    ids = torch.randint(13, (4, 9), generator=torch.Generator().manual_seed(100 * step + microbatch + 1000 * dp))
    return ids[:, :-1], ids[:, 1:].clone()


def team(model, mesh, **changes):
    fields = {"model": model, "data": Batches(tokens, tokens), "optim": AdamW(lr=1e-2), "steps": 3, "microbatches": 2}
    return Team.of(Run(mesh=mesh, timeout=10.0, **fields | changes))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        (Mesh(pp=2), {}),
        (Mesh(tp=2), {}),
        (Mesh(tp=4), {}),
        (Mesh(tp=2), {"sequence_parallel": True}),
        (Mesh(tp="2d:2x2"), {}),
        (Mesh(cp=2), {}),
        (Mesh(cp=2), {"context": "ulysses"}),
        (Mesh(cp=2, pp=2), {"context": "rsa"}),
        (Mesh(dp=2, tp=2), {"zero": 3}),
    ],
    ids=str,
)
def test_a_llama_with_all_of_it_is_the_same_on_every_axis(mesh, changes):
    agrees(team(QWEN, mesh, **changes))


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        (Mesh(pp=2, tp=2), {"sequence_parallel": True}),
        (Mesh(tp="3d:2x2x2"), {}),
        (Mesh(cp=2), {"context": "ulysses"}),
        (Mesh(cp=2), {"context": "rsa"}),
        (Mesh(dp=2), {"zero": 3, "recompute": "selective"}),
    ],
    ids=str,
)
def test_a_gemma_with_all_of_it_is_the_same_on_every_axis(mesh, changes):
    agrees(team(GEMMA, mesh, **changes))


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", [Mesh(pp=2, tp=2), Mesh(tp="2d:2x2"), Mesh(cp=2)], ids=str)
def test_a_gpt_with_all_of_it_is_the_same_on_every_axis(mesh):
    agrees(team(GPT2, mesh))


@pytest.mark.parametrize("kind", ["fused", "materialised", "blocks"])
@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_a_token_sees_its_window(kind, window):
    q, k, v = (torch.randn(2, 4, 8, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    seen = torch.tensor([[key <= query < key + window for key in range(8)] for query in range(8)])
    wanted = scaled_dot_product_attention(q, k, v, attn_mask=seen)
    torch.testing.assert_close(Core(kind, 0.0, None, window=window)(q, k, v), wanted)


def test_a_long_sequence_in_blocks_has_its_window_too():
    q, k, v = (torch.randn(1, 4, 1024, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    made, wanted = (Core(kind, 0.0, None, window=100)(q, k, v) for kind in ("blocks", "materialised"))
    torch.testing.assert_close(made, wanted)


def test_only_the_blocks_behind_the_first_have_the_window():
    model = build_model(QWEN, 0)
    assert [model.skeleton[index].attn.core.window for index in model.body] == [None, 3]
    assert [Llama(layers=6, window=4, window_first=1, window_skips=3).window_of(block) for block in range(6)] == [
        None, 4, None, 4, 4, None,
    ]  # fmt: skip


def test_what_does_not_go_together_is_told():
    def faults(model):
        return list(model.faults(lambda *paths: True))

    assert faults(QWEN) == []
    assert faults(Llama(hidden=10, heads=3, head_width=4)) == [], "heads need not divide hidden"
    assert faults(Llama(hidden=12, heads=3, head_width=5)) == [
        "model.positions is 'rope', which turns pairs, but a head has the odd width 5: set model.head_width to 6, "
        "say, or take other positions"
    ]
    assert faults(GPT(window_first=2)) == [
        "model.window_first is 2, but there is no window: give model.window, or leave it out"
    ]
    assert faults(GPT(window_skips=2)) == [
        "model.window_skips is 2, but there is no window: give model.window, or leave it out"
    ]
    assert faults(Llama(attention_cap=50.0)) == [
        "model.attention is 'blocks', and model.attention_cap changes every score: set model.attention to "
        "'materialised'"
    ]
