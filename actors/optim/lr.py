"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from raypar.actors.specs.optim import OptimizerSettings


def lr_at(spec: OptimizerSettings, step: int, steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then decay, then constant after the end of the run.

    Args:
        spec: The optimizer's settings: peak rate, warm-up steps, kind of decay, and final rate as a fraction of the
            peak.
        step: Number of the step, from 0.
        steps: Number of steps of the whole run.

    Source:
        The decay ends as in transformers' schedules (transformers/optimization.py), one step after the run.
        Hu et al. 2024, "MiniCPM", section 4 (warm-up, stable, decay); Hägele et al. 2024, "Scaling laws and
        compute-optimal training beyond fixed training durations", section 3 (1 - sqrt).
    """
    if step < spec.warmup:
        return spec.lr * (step + 1) / spec.warmup
    if spec.decay == "constant":
        return spec.lr
    start, end = spec.warmup, steps - (spec.decay_end == "last")  # the last step at the peak, the first at the end
    if spec.decay == "wsd":
        start = max(start, steps - 1 - (max(1, steps // 10) if spec.decay_steps is None else spec.decay_steps))
    done = min(1.0, max(0, step - start) / max(1, end - start))
    if spec.decay == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * done))
    else:
        left = 1 - (math.sqrt(done) if spec.decay_form == "sqrt" else done)
    return spec.lr * (spec.final + (1 - spec.final) * left)
