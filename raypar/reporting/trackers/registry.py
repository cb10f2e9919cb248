"""The trackers by name: what each needs, and how it is made. Packages are imported only when they are asked for."""

from __future__ import annotations

import importlib

from raypar.actors.specs.types import Tracker
from raypar.paths import TENSORBOARD, absolute
from raypar.reporting.trackers.tracker import Sink


def sink_of(tracker: Tracker, run: str, folder: str | None, step: int) -> Sink:
    """The sink of a tracker, for a run of this name that begins at ``step``."""
    module = importlib.import_module(f"raypar.reporting.trackers.{'gauges' if tracker == 'ray' else tracker}")
    sink: Sink
    if tracker == "tensorboard":
        assert folder is not None
        sink = module.TensorBoard(absolute(folder) / TENSORBOARD, step)
    elif tracker == "wandb":
        sink = module.Wandb(run, folder)
    elif tracker == "mlflow":
        sink = module.MLflow(run)
    else:
        sink = module.Gauges(run)
    return sink
