"""The dynamic scale of the loss, and the count of skipped steps."""

from __future__ import annotations

import torch
from torch import Tensor

from raypar.actors.specs.precision import LossScale

NUMBERS = 5  # of the state in a checkpoint


class LossScaler:
    """The factor of the loss. It is the same on every actor, because all count the same overflows.

    Args:
        spec: Its settings; None if the loss is not scaled, so that the scale is always 1.

    Attributes:
        scale: The factor of the next step.
        skipped: Steps since the run began that changed no weight. The learning rate does not count them.
        left_out: Steps whose data a rewound run skips: step n reads the data of step n + left_out.

    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
    """

    def __init__(self, spec: LossScale | None) -> None:
        self._spec = spec
        self.scale = 1.0 if spec is None else spec.init
        self._clean = 0  # steps without an overflow since the scale last changed
        self._overflows = 0  # since the scale last changed
        self.skipped, self.left_out = 0, 0

    @property
    def is_fresh(self) -> bool:
        """Whether no step was skipped or left out; then a checkpoint need not have the counts."""
        return not self.skipped and not self.left_out

    @property
    def is_on(self) -> bool:
        """Whether the loss is scaled."""
        return self._spec is not None

    @property
    def clamps(self) -> bool:
        """Whether infinite gradients are replaced by the largest number of fp16."""
        return self._spec is not None and self._spec.overflow == "clamp"

    @property
    def can_fall(self) -> bool:
        """Whether the scale is above its floor, so that the next step may have no overflow."""
        return self._spec is not None and self.scale > self._spec.floor

    def grow(self) -> None:
        """Count a step without an overflow. After a window of them the scale grows."""
        if self._spec is None:
            return
        self._clean += 1
        if self._clean >= self._spec.window:
            self._change(self.scale * self._spec.growth)

    def fall(self) -> None:
        """Count an overflow. The scale falls after ``hysteresis`` overflows since it last changed."""
        if self._spec is None:
            return
        self._clean = 0
        self._overflows += 1
        if self._overflows >= self._spec.hysteresis:
            self._change(max(self._spec.floor, self.scale * self._spec.backoff))

    def numbers(self) -> Tensor:
        """Return the whole state, (NUMBERS,) float64 on the host; the scale is 0 if the loss is not scaled."""
        state = [self.scale if self.is_on else 0.0, self._clean, self._overflows, self.skipped, self.left_out]
        return torch.tensor(state, dtype=torch.float64)

    def load(self, numbers: Tensor) -> None:
        """Restore the state that ``numbers`` returned.

        If the loss is not scaled now, the scale stays 1; if it was not scaled then, the scale starts as in a new run.
        """
        scale, *counts = numbers.tolist()
        clean, overflows, self.skipped, self.left_out = map(int, counts)
        if self._spec is not None and scale:
            self.scale, self._clean, self._overflows = scale, clean, overflows

    def _change(self, scale: float) -> None:
        self.scale, self._clean, self._overflows = min(scale, 2.0**127), 0, 0
