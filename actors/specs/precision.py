"""The dtypes of a run: of the layers, of the sums of gradients, of the weights that the optimizer updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from raypar.actors.bounds import Count
from raypar.actors.known_fields import known_fields

DType = Literal["fp32", "bf16", "fp16"]
Compute = Literal[DType, "fp8"]
Nonfinite = Literal["stop", "skip", "rewind"]  # what becomes of a step whose loss or gradients are not finite

FP8_CAPABILITY = 8, 9  # compute capability of the first GPUs that multiply fp8
FP8_MULTIPLE = 16  # of which GPUs multiply matrices of fp8 in both dims of a weight
WITHOUT_FP8 = frozenset(  # GPUs before compute capability 8.9, by Ray's names
    ("K80", "P4", "P100", "V100", "T4", "A10", "A10G", "A30", "A40", "A100", "A100-40G", "A100-80G")
)
FP16_MAX = 65504.0
FP16_SMALLEST = 2.0**-24  # of the numbers above 0, with gradual underflow


@known_fields()
@dataclass(frozen=True)
class Precision:
    """Mixed precision (Micikevicius et al. 2018): layers compute in half precision, the optimizer updates masters.

    Softmax, norms and losses are computed in fp32 whatever the dtype of the layers.
    """

    compute: Compute = "fp32"
    """dtype of the layers' weights, of what they compute, and of what goes between stages; fp8: as bf16, but the
    products of linear layers in blocks and of their gradients' inputs are in fp8 (E4M3), with a scale for each row"""
    reduce: DType = "fp32"
    """dtype in which gradients are added up, over microbatches and over replicas"""
    master: DType = "fp32"
    """dtype of the weights that the optimizer updates, of its states and of checkpoints"""
    tf32: bool = False
    """on GPUs, multiply fp32 matrices and convolutions in TF32, with 10 bits of a mantissa where fp32 has 23; if not,
    in fp32 (torch's own default has convolutions in TF32)"""

    @property
    def layers(self) -> DType:
        """The dtype of the layers' weights and of what goes between them."""
        return "bf16" if self.compute == "fp8" else self.compute

    @property
    def is_mixed(self) -> bool:
        """Whether the optimizer's weights are other tensors than the layers'."""
        return self.layers != self.master

    @property
    def is_half(self) -> bool:
        """Whether the layers compute in half precision."""
        return self.compute != "fp32"

    def faults(self) -> Iterator[str]:
        """Yield the settings that contradict each other, each with its fix."""
        if self.tf32 and self.is_half:
            yield f"precision.tf32 is for layers in fp32, and precision.compute is {self.compute!r}: leave it out"
        if not self.is_half and self.master != "fp32":
            fix = f"set precision.compute to {self.master!r} too"
            yield f"precision.master is {self.master!r}, but layers compute in fp32: {fix}"
        elif self.master not in ("fp32", self.layers):
            what = f"precision.master is {self.master!r}, precision.compute {self.compute!r}"
            yield f"{what}: set precision.master to 'fp32'"
        if self.reduce not in ("fp32", self.layers):
            fix = " or ".join(map(repr, dict.fromkeys(("fp32", self.layers))))
            what = f"precision.reduce is {self.reduce!r}, precision.compute {self.compute!r}"
            yield f"{what}: set precision.reduce to {fix}"
        elif self.is_half and self.master == self.layers and self.reduce != self.master:
            fix = f"set precision.reduce to {self.master!r} too, or precision.master to 'fp32'"
            yield f"precision.master is {self.master!r}, but gradients are added up in {self.reduce}: {fix}"


@known_fields()
@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2), which keeps small gradients above fp16's zero.

    The loss is multiplied by the scale before the backward, and the gradients divided by it before they are clipped. A
    step with an overflow is skipped on every actor, and the scale falls; after a window of steps without, it grows.
    """

    use: Literal["auto", "on", "off"] = "auto"
    """auto: on if the layers compute in fp16"""
    init: Annotated[float, Gt(0), Lt(1e38)] = 2.0**16
    """the first scale"""
    window: Count = 1000
    """steps without an overflow after which the scale grows"""
    growth: Annotated[float, Gt(1)] = 2.0
    """factor by which it grows"""
    backoff: Annotated[float, Gt(0), Lt(1)] = 0.5
    """factor by which it falls after an overflow"""
    floor: Annotated[float, Gt(0)] = 1.0
    """the smallest scale"""
    hysteresis: Annotated[int, Ge(1)] = 1
    """overflows since the scale last changed before it falls"""
    overflow: Literal["skip", "clamp"] = "skip"
    """clamp: instead of skipping a step, replace infinite gradients by the largest number of fp16 (experimental)"""

    def is_on(self, precision: Precision) -> bool:
        """Return whether a run of this precision scales its loss."""
        return self.use == "on" or (self.use == "auto" and precision.compute == "fp16")

    def faults(self, precision: Precision) -> Iterator[str]:
        """Yield the settings that contradict each other, each with its fix.

        Args:
            precision: The run's precision.
        """
        if precision.compute == "fp16" and self.use == "off":
            yield (
                "precision.compute is 'fp16', but loss_scale.use is 'off', and gradients below 6e-8 would be 0: set it "
                "to auto, or compute in bf16"
            )
        if self.floor > self.init:
            fix = f"set loss_scale.floor to {self.init:g} or less"
            yield f"loss_scale.floor {self.floor:g} is above loss_scale.init {self.init:g}: {fix}"
