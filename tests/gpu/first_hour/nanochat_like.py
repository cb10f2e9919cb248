"""A GPT as nanochat has it, written from its description: rotary positions, norms without weights, squared ReLU.

Queries and keys are normalised, there are no biases, embedding and head are apart, and logits are capped. It stands for
the loop that one writes for one GPU and one model: autocast, a fused AdamW, all of it compiled.

Shapes: B microbatch, S sequence, D hidden, H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import raypar as rp
from raypar.actors.machine.device import ComputeDevice
from tests.bench.peers.whole import training_loop
from tests.bench.trainer import LocalTrainer

_CAP = 15.0


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class _Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts = self.qkv(_norm(x_BSD)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        q, k = (_norm(_rotated(part, cos, sin)).to(v.dtype) for part in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BSD + self.down(F.relu(self.up(_norm(x_BSD))).square())


def _rotated(x_BHSd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x_BHSd.chunk(2, dim=-1)
    return torch.cat([one * cos + other * sin, other * cos - one * sin], dim=-1)


class NanochatLike(nn.Module):
    """Tokens (B, S) and labels (B, S) -> the mean loss, a scalar."""

    def __init__(self, spec: rp.GPT | rp.Llama) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(spec.vocab, spec.hidden), nn.Linear(spec.hidden, spec.vocab, bias=False)
        self.blocks = nn.ModuleList(_Block(spec.hidden, spec.heads) for _ in range(spec.layers))
        width = spec.hidden // spec.heads
        angles = torch.outer(torch.arange(spec.seq), 10_000.0 ** (-torch.arange(0, width, 2) / width))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        x_BSD = _norm(self.embed(tokens_BS))
        for block in self.blocks:
            x_BSD = block(x_BSD, self.cos, self.sin)
        logits_BSV = _CAP * torch.tanh(self.head(_norm(x_BSD)).float() / _CAP)
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())


def nanochat_like(run: rp.Run, place: ComputeDevice, compiler: str | None) -> LocalTrainer:
    """Its training on the run's batches, with the run's optimizer.

    ``compiler`` is the backend of torch.compile; None does not compile.
    """
    torch.manual_seed(run.seed)
    model = NanochatLike(run.model).to(place.device)
    objective = model if compiler is None else torch.compile(model, backend=compiler)
    return LocalTrainer(training_loop(run, 0, place.device, model, objective), place=place)
