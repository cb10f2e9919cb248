"""Export the model of a job while it runs."""

from __future__ import annotations

import shutil
from os import PathLike
from pathlib import Path
from uuid import uuid4

from raypar.actors.machine.files import checkpoint_errors
from raypar.actors.specs.types import Format
from raypar.checkpoint.check import verified
from raypar.checkpoint.find import VerifiedCheckpoint
from raypar.checkpoint.hugging_face import demand_exportable, export
from raypar.config.toml import plain_of
from raypar.job.steps.averages import demand_averages
from raypar.job.steps.training_loop import TrainingLoop
from raypar.paths import absolute


def export_hf(loop: TrainingLoop, folder: str | PathLike[str], dtype: Format | None, *, ema: bool) -> Path:
    """Write a job's model as a folder of Hugging Face; see ``Job.export_hf``.

    The actors write their parts of the weights beside the folder, as in a checkpoint; this process then writes them in
    the order of Hugging Face, some megabytes at a time, and removes what the actors have written.
    """
    path = absolute(folder)
    if ema:
        demand_averages(loop.loaded.run)
    demand_exportable(plain_of(loop.loaded.run), path)
    parts = path.with_name(f".{path.name}.{uuid4().hex}.parts")
    try:
        with checkpoint_errors(f"{str(path)!r} can't be written"):
            parts.mkdir()
        saved = loop.copy_weights(parts, ema=ema)
        loss = None if loop.last is None else loop.last.loss
        return export(VerifiedCheckpoint(saved, verified(saved)), path, dtype, loss)
    finally:
        shutil.rmtree(parts, ignore_errors=True)
