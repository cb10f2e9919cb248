"""The Llama family: RMSNorm, a gated MLP, no biases.

Shapes: B microbatch, S sequence, D hidden, F width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.layers.adapter import adapter_of, applied, fanned
from raypar.actors.layers.linear import SharedInputLinears, linear_of
from raypar.actors.models.transformer import TransformerModel
from raypar.actors.specs.model import Gate, Llama, Transformer

_GATES: Mapping[Gate, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class GatedMLP(nn.Module):
    """Gated MLP, down(a(gate(x)) * up(x)): (..., D) -> (..., D) (Shazeer 2020, section 2): SwiGLU if a is silu.

    Args:
        spec: The model.
        width: Width F.
    """

    def __init__(self, spec: Transformer, width: int) -> None:
        super().__init__()
        linear, hidden = linear_of(spec.linear), spec.hidden
        self.gate, self.up = linear(hidden, width, bias=False), linear(hidden, width, bias=False)
        self.down = linear(width, hidden, bias=False)
        self.gate_lora, self.up_lora = adapter_of(spec, self.gate, "gate"), adapter_of(spec, self.up, "up")
        self.down_lora = adapter_of(spec, self.down, "down")
        self.fan = SharedInputLinears()
        self._activated = _GATES[spec.gate if isinstance(spec, Llama) else "silu"]

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate_BSF, up_BSF = fanned(self.fan, x_BSD, ((self.gate, self.gate_lora), (self.up, self.up_lora)))
        return applied(self.down, self.down_lora, self._activated(gate_BSF) * up_BSF)


class LlamaModel(TransformerModel):
    """Llama (Touvron et al. 2023, section 2.2)."""

    bias = False

    def __init__(self, llama: Llama) -> None:
        super().__init__(llama)

    def norm(self) -> nn.Module:
        return nn.RMSNorm(self.spec.hidden, eps=self.spec.norm_eps)

    def mlp(self, width: int) -> nn.Module:
        return GatedMLP(self.spec, width)
