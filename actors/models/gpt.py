"""A pre-LN GPT: embedding, blocks, head, each a layer of its own.

Shapes: B microbatch, S sequence, D hidden, N heads, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.cut import Cut
from raypar.actors.deferred import on_meta, unfilled
from raypar.actors.models.model import IGNORED, Divide, Model, Values, undivided
from raypar.actors.seeds import derive
from raypar.actors.specs import GPT
from raypar.actors.split import gpt_costs


class Embedding(nn.Module):
    """Token plus learned position embedding: ids (B, S) int64 -> (B, S, D)."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.tokens = nn.Embedding(gpt.vocab, gpt.hidden)
        self.positions = nn.Embedding(gpt.seq, gpt.hidden)
        self.drop = nn.Dropout(gpt.dropout)

    def forward(self, ids_BS: Tensor) -> Tensor:
        positions_SD = self.positions(torch.arange(ids_BS.shape[1], device=ids_BS.device))
        out: Tensor = self.drop(self.tokens(ids_BS) + positions_SD)
        return out


class AttentionCore(nn.Module):
    """softmax(Q K^T / sqrt(d)) V over the past: three (B, N, S, d) -> (B, N, S, d)."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q_BNSd: Tensor, k_BNSd: Tensor, v_BNSd: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q_BNSd, k_BNSd, v_BNSd, dropout_p=dropout, is_causal=True)


class Attention(nn.Module):
    """Causal self-attention: (B, S, D) -> (B, S, D).

    The projections in have no bias. That of the keys would shift a softmax, which changes nothing: its gradient is
    rounding noise, and Adam would turn that into steps of full size.
    """

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.head_size = gpt.hidden // gpt.heads
        self.q, self.k, self.v = (nn.Linear(gpt.hidden, gpt.hidden, bias=False) for _ in range(3))
        self.core = AttentionCore(gpt.dropout)
        self.out = nn.Linear(gpt.hidden, gpt.hidden)

    def forward(self, x_BSD: Tensor) -> Tensor:
        q_BNSd, k_BNSd, v_BNSd = (
            linear(x_BSD).unflatten(2, (-1, self.head_size)).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        y_BNSd = self.core(q_BNSd, k_BNSd, v_BNSd)
        out: Tensor = self.out(y_BNSd.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """Two linear layers around a GELU: (B, S, D) -> (B, S, D)."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.up = nn.Linear(gpt.hidden, gpt.mlp * gpt.hidden)
        self.down = nn.Linear(gpt.mlp * gpt.hidden, gpt.hidden)

    def forward(self, x_BSD: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x_BSD)))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to the residual stream: (B, S, D) -> (B, S, D)."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(gpt.hidden), Attention(gpt)
        self.norm2, self.mlp = nn.LayerNorm(gpt.hidden), MLP(gpt)
        self.drop = nn.Dropout(gpt.dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.drop(self.attn(self.norm1(x_BSD)))
        out: Tensor = x_BSD + self.drop(self.mlp(self.norm2(x_BSD)))
        return out


class Head(nn.Module):
    """Final LayerNorm and projection to the vocabulary: (B, S, D) -> logits (B, S, V)."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(gpt.hidden)
        self.out = nn.Linear(gpt.hidden, gpt.vocab, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        logits_BSV: Tensor = self.out(self.norm(x_BSD))
        return logits_BSV


class GPTModel(Model):
    """The layers ``embed``, ``blocks.0`` ... and ``head``, initialised as GPT-2 (Radford et al. 2019, section 2.3)."""

    tensor_plan = (
        ("embed.tokens", "vocab"),
        ("embed.positions", "table"),
        ("embed.drop", "drop"),
        ("blocks.*.attn", "enter"),
        ("blocks.*.attn.[qkv]", "column"),
        ("blocks.*.attn.core", "heads"),
        ("blocks.*.attn.out", "row"),
        ("blocks.*.mlp", "enter"),
        ("blocks.*.mlp.up", "column"),
        ("blocks.*.mlp.down", "row"),
        ("blocks.*.drop", "drop"),
        ("head.out", "logits"),
        ("head.out", "enter"),
    )

    def __init__(self, gpt: GPT) -> None:
        self.gpt = gpt
        self.names = ("embed", *(f"blocks.{i}" for i in range(gpt.layers)), "head")
        self.body = range(1, gpt.layers + 1)
        self.costs = gpt_costs(gpt)
        self.ties = (("embed.tokens.weight", "head.out.weight"),) if gpt.tied else ()
        super().__init__(on_meta(lambda: map(self._layer, range(len(self.names)))))

    def materialize(self, layers: Sequence[int], seed: int, divide: Divide = undivided) -> list[nn.Module]:
        """These layers, each weight drawn by a generator of its own, seeded by its logical name; whole, one by one, and
        then cut."""
        homes = {copy: home for home, copy in self.ties}
        made = []
        for index in layers:
            (module,), layer = unfilled(partial(map, self._layer, [index])), self.names[index]
            cuts = divide(layer, module)
            for inner, parameter in module.named_parameters():
                name = f"{layer}.{inner}"
                self._init(homes.get(name, name), parameter, cuts.get(inner, Cut(tuple(parameter.shape))), seed)
            made.append(module)
        return made

    def loss(self, output: Values, target: Values) -> Tensor:
        """Mean cross-entropy of logits (B, S, V) against labels (B, S) int64, in nats a token; labels of -100 are left
        out, and without any other the loss is 0."""
        (logits_BSV,), (labels_BS,) = output, target
        total = self.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())
        mean: Tensor = total / (labels_BS != IGNORED).sum().clamp(min=1)  # counted where the labels are: nobody waits
        return mean

    def _layer(self, index: int) -> nn.Module:
        if index == 0:
            return Embedding(self.gpt)
        return Block(self.gpt) if index in self.body else Head(self.gpt)

    @torch.no_grad()
    def _init(self, name: str, parameter: Tensor, cut: Cut, seed: int) -> None:
        if name.endswith(".bias"):
            parameter.zero_()
        elif ".norm" in name:
            parameter.fill_(1.0)
        else:
            # projections back into the residual stream: one for every branch that is added to it
            branches = 2 * self.gpt.layers if name.endswith(("attn.out.weight", "mlp.down.weight")) else 1
            generator = torch.Generator().manual_seed(derive(seed, name))
            whole = parameter if cut.span is None else parameter.new_empty(cut.whole)
            whole.normal_(0.0, 0.02 / math.sqrt(branches), generator=generator)
            if cut.span is not None:
                parameter.copy_(cut.take(whole))
