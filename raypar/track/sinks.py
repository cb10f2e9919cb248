"""The trackers by name: what each needs, and how it is made. Packages are imported only when they are asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Literal

from raypar.folder.names import TENSORBOARD, absolute
from raypar.track.sink import Sink

Tracker = Literal["tensorboard", "wandb", "mlflow", "ray"]

_PACKAGES: dict[Tracker, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def track_faults(track: Sequence[Tracker], folder: str | None) -> Iterator[str]:
    """Why trackers can't be told of a run that leaves its things in ``folder``."""
    for name in track:
        package = _PACKAGES.get(name)
        if package is not None and package not in sys.modules and not _installed(package):
            yield f"track has {name!r}, but there is no package {package}: pip install {package}"
    if "tensorboard" in track and folder is None:
        yield "track has 'tensorboard', which writes into the run's folder: give a folder"


def _installed(package: str) -> bool:
    """Whether there is such a package, and not just a folder of this name: W&B leaves one."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def sink_of(tracker: Tracker, run: str, folder: str | None, step: int) -> Sink:
    """The sink of a tracker, for a run of this name that begins at ``step``."""
    module = importlib.import_module(f"raypar.track.{'gauges' if tracker == 'ray' else tracker}")
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
