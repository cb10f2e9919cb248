"""The model that adapters belong to: a checkpoint with adapters alone knows it by the fingerprint of its weights.

A checkpoint whose weights are the moving averages that it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from raypar.actors.errors import CheckpointError
from raypar.actors.specs.model import Transformer
from raypar.actors.specs.run import Run
from raypar.checkpoint.find import VerifiedCheckpoint
from raypar.errors import ConfigError


def base_weights_fingerprint(run: Run) -> str:
    """Return the fingerprint of the weights that a run's adapters are added to; "" if it has none, or they are gone."""
    if not isinstance(run.model, Transformer) or run.model.lora is None or run.model.hf is None:
        return ""
    from raypar.actors.hugging_face.fingerprint import fingerprint  # imports torch

    try:
        return fingerprint(Path(run.model.hf))
    except CheckpointError:
        return ""


def base_faults(run: Run, found: VerifiedCheckpoint) -> Iterator[str]:
    """Yield whether a checkpoint's adapters belong to other weights than those in the folder of a run's model.

    Args:
        run: The run, whose model has the shapes of the checkpoint's.
        found: The checkpoint.
    """
    wanted = found.manifest.base
    if not wanted or not isinstance(run.model, Transformer) or run.model.hf is None:
        return
    if (there := base_weights_fingerprint(run)) and there != wanted:
        told = f"model.hf {run.model.hf!r} has other weights than those that the adapters were trained on"
        yield f"{told}: give the folder of that model, or a copy of it"


def averaged(found: VerifiedCheckpoint) -> VerifiedCheckpoint:
    """Return a checkpoint with the averages in the place of the weights, and without the optimizer's state.

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
