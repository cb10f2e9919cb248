"""The trackers by name. A tracker's package is imported only when the tracker is used."""

from __future__ import annotations

import importlib

from raypar.actors.specs.types import Tracker
from raypar.paths import TENSORBOARD, absolute
from raypar.reporting.trackers.tracker import Sink


def sink_of(tracker: Tracker, run: str, folder: str | None, step: int, job: str) -> Sink:
    """Make the sink of a tracker.

    Args:
        tracker: The tracker's name.
        run: The run's name.
        folder: The run folder, or None; TensorBoard needs one.
        step: Number of steps taken before.
        job: The job's name, which no other job has.

    Returns:
        The sink.
    """
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
        sink = module.Gauges(run, job)
    return sink
