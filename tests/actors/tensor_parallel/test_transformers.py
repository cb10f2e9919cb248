"""A Llama of Hugging Face's transformers, divided by a plan: on threads, without Ray.

pip install 'raypar[transformers]': not a part of what the tests are installed with.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raypar.actors.specs.optim import AdamW
from tests.support.own_layers import cross_entropy, team_of
from tests.support.tensor_teams import agrees

pytest.importorskip("transformers")

ATTENTION_AND_MLP = {
    "self_attn.[qkv]_proj": "column",
    "self_attn.o_proj": "row",
    "mlp.gate_proj": "column",
    "mlp.up_proj": "column",
    "mlp.down_proj": "row",
}


def config(tied=False):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8,
        tie_word_embeddings=tied,
        use_cache=False,
        attn_implementation="sdpa",
    )


class Whole(nn.Module):
    """All of it as one layer: ids -> logits."""

    def __init__(self, tied):
        from transformers import LlamaForCausalLM

        super().__init__()
        self.net = LlamaForCausalLM(config(tied))

    def forward(self, ids_BS):
        return self.net(input_ids=ids_BS).logits


class Decoder(nn.Module):
    """A decoder layer, which is told where its tokens stand: (B, S, D) -> (B, S, D)."""

    def __init__(self, index):
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        super().__init__()
        self.layer, self.rotary = LlamaDecoderLayer(config(), index), LlamaRotaryEmbedding(config())

    def forward(self, x_BSD):
        positions = torch.arange(x_BSD.shape[1])[None]
        return self.layer(x_BSD, position_embeddings=self.rotary(x_BSD, positions), position_ids=positions)


def layers():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    head = nn.Sequential(LlamaRMSNorm(16), nn.Linear(16, 12, bias=False))
    return [nn.Embedding(12, 16), Decoder(0), Decoder(1), head]


def tokens(step, microbatch, dp):
    generator = torch.Generator().manual_seed(100 * step + microbatch + 1000 * dp)
    ids = torch.randint(12, (2, 6), generator=generator)
    return ids, ids.roll(1)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_whole_llama(tied):
    plan = {f"layers.0.net.model.layers.*.{name}": kind for name, kind in ATTENTION_AND_MLP.items()}
    plan |= {"layers.0.net.model.embed_tokens": "embedding", "layers.0.net.lm_head": "column_gather_output"}
    agrees(team_of(lambda: [Whole(tied)], plan, loss=cross_entropy, data=tokens, optim=AdamW(lr=1e-2)))


def test_its_layers_over_a_pipeline():
    plan = {f"layers.*.layer.{name}": kind for name, kind in ATTENTION_AND_MLP.items()}
    plan |= {"layers.0": "embedding", "layers.3.1": "column_gather_output"}
    agrees(team_of(layers, plan, pp=2, loss=cross_entropy, data=tokens))
