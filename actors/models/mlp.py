"""The MLP of a GPT, with a GELU, and that of a Llama, with a gate.

Shapes: B microbatch, S sequence, D hidden, F width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.layers.adapter import adapter_of, applied, fanned
from raypar.actors.layers.linear import SharedInputLinears, linear_of
from raypar.actors.specs.model import GPT, Gate, Llama

_GATES: Mapping[Gate, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class MLP(nn.Module):
    """Two linear layers around a GELU: (..., D) -> (..., D).

    Args:
        spec: The model.
        width: Width F.
    """

    def __init__(self, spec: GPT, width: int) -> None:
        super().__init__()
        linear = linear_of(spec.linear)
        self.up, self.down = linear(spec.hidden, width), linear(width, spec.hidden)
        self.up_lora, self.down_lora = adapter_of(spec, self.up, "up"), adapter_of(spec, self.down, "down")
        self.fan = SharedInputLinears()
        self.approximate = "tanh" if spec.gelu == "tanh" else "none"

    def forward(self, x_BSD: Tensor) -> Tensor:
        (y_BSF,) = fanned(self.fan, x_BSD, ((self.up, self.up_lora),))
        return applied(self.down, self.down_lora, F.gelu(y_BSF, approximate=self.approximate))


class GatedMLP(nn.Module):
    """Gated MLP, down(a(gate(x)) * up(x)): (..., D) -> (..., D) (Shazeer 2020, section 2): SwiGLU if a is silu.

    Args:
        spec: The model.
        width: Width F.
    """

    def __init__(self, spec: Llama, width: int) -> None:
        super().__init__()
        linear, hidden = linear_of(spec.linear), spec.hidden
        self.gate, self.up = linear(hidden, width, bias=False), linear(hidden, width, bias=False)
        self.down = linear(width, hidden, bias=False)
        self.gate_lora, self.up_lora = adapter_of(spec, self.gate, "gate"), adapter_of(spec, self.up, "up")
        self.down_lora = adapter_of(spec, self.down, "down")
        self.fan = SharedInputLinears()
        self._activated = _GATES[spec.gate]

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate_BSF, up_BSF = fanned(self.fan, x_BSD, ((self.gate, self.gate_lora), (self.up, self.up_lora)))
        return applied(self.down, self.down_lora, self._activated(gate_BSF) * up_BSF)
