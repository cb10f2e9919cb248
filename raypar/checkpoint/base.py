"""The model that adapters belong to: a checkpoint with adapters alone knows it by the fingerprint of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from raypar.actors.errors import CheckpointError
from raypar.actors.specs.model import Transformer
from raypar.actors.specs.run import Run
from raypar.checkpoint.find import VerifiedCheckpoint


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
        fault = f"model.hf {run.model.hf!r} has other weights than those that the adapters were trained on"
        yield f"{fault}: give the folder of that model, or a copy of it"
