"""The GPT family: LayerNorm, an MLP with a GELU, biases.

Shapes: B microbatch, S sequence, D hidden, F width of the MLP.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.layers.adapter import adapter_of, applied, fanned
from raypar.actors.layers.linear import SharedInputLinears, linear_of
from raypar.actors.models.transformer import TransformerModel
from raypar.actors.specs.model import GPT, Transformer


class MLP(nn.Module):
    """Two linear layers around a GELU: (..., D) -> (..., D).

    Args:
        spec: The model.
        width: Width F.
    """

    def __init__(self, spec: Transformer, width: int) -> None:
        super().__init__()
        linear = linear_of(spec.linear)
        self.up, self.down = linear(spec.hidden, width), linear(width, spec.hidden)
        self.up_lora, self.down_lora = adapter_of(spec, self.up, "up"), adapter_of(spec, self.down, "down")
        self.fan = SharedInputLinears()
        self.approximate = "tanh" if isinstance(spec, GPT) and spec.gelu == "tanh" else "none"

    def forward(self, x_BSD: Tensor) -> Tensor:
        (y_BSF,) = fanned(self.fan, x_BSD, ((self.up, self.up_lora),))
        return applied(self.down, self.down_lora, F.gelu(y_BSF, approximate=self.approximate))


class GPTModel(TransformerModel):
    """GPT with pre-LayerNorm (Radford et al. 2019, GPT-2, section 2.3)."""

    bias = True

    def __init__(self, gpt: GPT) -> None:
        super().__init__(gpt)

    def norm(self) -> nn.Module:
        return nn.LayerNorm(self.spec.hidden, eps=self.spec.norm_eps)

    def mlp(self, width: int) -> nn.Module:
        return MLP(self.spec, width)
