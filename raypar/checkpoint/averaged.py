"""A checkpoint whose weights are the moving averages that it has."""

from __future__ import annotations

from dataclasses import replace

from raypar.checkpoint.find import VerifiedCheckpoint
from raypar.errors import ConfigError


def averaged(found: VerifiedCheckpoint) -> VerifiedCheckpoint:
    """Return a checkpoint with the averages instead of the weights, and without the optimizer's state.

    Args:
        found: The checkpoint of a run with ``ema``.

    Raises:
        ConfigError: It has no averages.
    """
    from raypar.actors.checkpoint.snapshot import AVERAGE, logical_name  # imports torch

    tensors = {name: one for name, one in found.manifest.tensors.items() if not name.startswith("optim.")}
    means = {
        name: found.manifest.tensors[kept]
        for name in tensors
        if (kept := logical_name(name, AVERAGE)) in found.manifest.tensors
    }
    if not means:
        fix = "leave ema out, or train with ema 0.999, say, which keeps them"
        raise ConfigError([f"{str(found.path)!r} has no averages of its weights: {fix}"])
    return replace(found, manifest=replace(found.manifest, tensors=tensors | means))
