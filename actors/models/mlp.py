"""The MLP of a block: two linear layers of a GPT, or three of a Llama, one of which is a gate.

Shapes: B microbatch, S sequence, D hidden, F width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.expert_parallel.grouped import ALIGNED, ExpertRows, grouped_linear, suits_grouped
from raypar.actors.layers.adapter import adapter_of, applied, fanned
from raypar.actors.layers.linear import SharedInputLinears, is_plain_linear, is_watched
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

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        """Its linear layers without adapters: the gate, if it has one, then up and down."""
        return (*(() if self.gate is None else (self.gate,)), self.up, self.down)

    def forward(self, x_BSD: Tensor) -> Tensor:
        gates = () if self.gate is None else ((self.gate, self.gate_lora),)
        *gate_BSF, up_BSF = fanned(self.fan, x_BSD, (*gates, (self.up, self.up_lora)))
        return applied(self.down, self.down_lora, self._between(up_BSF, *gate_BSF))

    def _between(self, up: Tensor, gate: Tensor | None = None) -> Tensor:
        return self._activated(up) if gate is None else self._activated(gate) * up


def are_groupable(mlps: Sequence[nn.Module], x_TD: Tensor) -> TypeGuard[Sequence[MLP]]:
    """Return whether ``grouped_mlps`` can compute modules for these tokens: MLPs of plain linear layers, on a GPU."""
    if not suits_grouped(x_TD):
        return False
    own = [mlp for mlp in mlps if type(mlp) is MLP and not is_watched(mlp)]
    linears = [linear for mlp in own for linear in mlp.linears]
    adapters = [one for mlp in own for one in (mlp.up_lora, mlp.down_lora, mlp.gate_lora) if one is not None]
    if len(own) < len(mlps) or adapters or not all(map(is_plain_linear, linears)):
        return False
    return not any(width % ALIGNED for width in own[0].up.weight.shape)


def grouped_mlps(mlps: Sequence[MLP], rows_ND: Tensor, rows: ExpertRows) -> Tensor:
    """Compute each row (N, D) with the MLP of its expert: (N, D).

    Args:
        mlps: The MLP of each expert.
        rows_ND: The rows.
        rows: Their experts.
    """

    def product(x: Tensor, linears: Iterable[nn.Linear]) -> Tensor:
        pairs = [(one.weight, one.bias) for one in linears]
        return grouped_linear(x, [w for w, _ in pairs], [b for _, b in pairs if b is not None], rows)

    *gates, ups, downs = zip(*(mlp.linears for mlp in mlps), strict=True)
    outs = [product(rows_ND, linears) for linears in (ups, *gates)]
    return product(mlps[0]._between(*outs), downs)
