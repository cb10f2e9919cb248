"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from raypar.actors.specs.optim import SGD, AdamW


def lr_at(spec: AdamW | SGD, step: int, steps: int) -> float:
    """The learning rate of a step (from 0) in a run of ``steps``: linear warm-up, decay, constant past the end."""
    if step < spec.warmup:
        return spec.lr * (step + 1) / spec.warmup
    if spec.decay == "constant":
        return spec.lr
    done = min(1.0, (step - spec.warmup) / max(1, steps - 1 - spec.warmup))
    left = 1 - done if spec.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return spec.lr * (spec.final + (1 - spec.final) * left)
