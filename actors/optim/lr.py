"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from raypar.actors.specs.optim import SGD, AdamW


def lr_at(spec: AdamW | SGD, step: int, steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then decay, then constant after the end of the run.

    Args:
        spec: The optimizer's settings: peak rate, warm-up steps, kind of decay, and final rate as a fraction of the
            peak.
        step: Number of the step, from 0.
        steps: Number of steps of the whole run.
    """
    if step < spec.warmup:
        return spec.lr * (step + 1) / spec.warmup
    if spec.decay == "constant":
        return spec.lr
    done = min(1.0, (step - spec.warmup) / max(1, steps - 1 - spec.warmup))
    left = 1 - done if spec.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return spec.lr * (spec.final + (1 - spec.final) * left)
