"""The MLP of a block: two linear layers of a GPT, or three of a Llama, one of which is a gate.

Shapes: B microbatch, S sequence, D hidden, F width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.layers.adapter import adapter_of, applied, fanned
from raypar.actors.layers.linear import SharedInputLinears
from raypar.actors.specs.model import GPT, Gate, Gelu, Llama

_ACTIVATIONS: Mapping[Gate | Gelu, Callable[[Tensor], Tensor]] = {
    "exact": F.gelu,
    "tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class MLP(nn.Module):
    """Linear layers around an activation a: (..., D) -> (..., D).

    A GPT computes down(a(up(x))), where a is a GELU. A Llama has a gate: down(a(gate(x)) * up(x)) (Shazeer 2020,
    section 2), which is SwiGLU if a is silu.

    Args:
        spec: The model.
        kind: The class of its linear layers.
        width: Width F.
    """

    def __init__(self, spec: GPT | Llama, kind: type[nn.Linear], width: int) -> None:
        super().__init__()
        linear, hidden = partial(kind, bias=spec.has_biases), spec.hidden
        self.gate = linear(hidden, width) if spec.is_gated else None
        self.up, self.down = linear(hidden, width), linear(width, hidden)
        self.gate_lora = None if self.gate is None else adapter_of(spec, self.gate, "gate")
        self.up_lora, self.down_lora = adapter_of(spec, self.up, "up"), adapter_of(spec, self.down, "down")
        self.fan = SharedInputLinears()
        self._activated = _ACTIVATIONS[spec.gate if isinstance(spec, Llama) else spec.gelu]

    def forward(self, x_BSD: Tensor) -> Tensor:
        gates = () if self.gate is None else ((self.gate, self.gate_lora),)
        *gate_BSF, up_BSF = fanned(self.fan, x_BSD, (*gates, (self.up, self.up_lora)))
        y_BSF = self._activated(gate_BSF[0]) * up_BSF if gate_BSF else self._activated(up_BSF)
        return applied(self.down, self.down_lora, y_BSF)
