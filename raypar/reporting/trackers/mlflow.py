"""The tracker MLflow. Its own environment variables (MLFLOW_TRACKING_URI and others) say where it sends figures."""

from __future__ import annotations

import importlib
from typing import Any

from raypar.config.toml import flat
from raypar.reporting.trackers.tracker import scalars


class MLflow:
    """A sink that writes to a run of MLflow, whose own thread sends the figures.

    Args:
        name: The run's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._mlflow: Any = importlib.import_module("mlflow")

    def begin(self, config: dict[str, Any]) -> None:
        self._mlflow.start_run(run_name=self._name)
        self._mlflow.log_params(flat(config))

    def write(self, outcome: dict[str, Any], step: int) -> None:
        self._mlflow.log_metrics(scalars(outcome), step=step, synchronous=False)

    def close(self) -> None:
        self._mlflow.flush_async_logging()
        self._mlflow.end_run()
