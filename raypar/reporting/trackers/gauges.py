"""The tracker "ray": gauges of Ray's metrics, which the cluster's dashboard or a Prometheus server shows."""

from __future__ import annotations

from typing import Any

from ray.util.metrics import Gauge

from raypar.user_name import user_name


def gauge(name: str, what: str, tags: tuple[str, ...]) -> Gauge:
    """Make a gauge of Ray's metrics.

    Args:
        name: The metric's name.
        what: Its description.
        tags: Names of its tags.
    """
    return Gauge(name, what, tags)


_GAUGES = {
    "loss": "training loss of the latest step",
    "grad_norm": "global gradient norm of the latest step",
    "tokens_per_s": "tokens a second of the latest step",
    "bubble": "share of the actors' time without compute in the latest step",
    "max_load": "largest load of an expert over the mean of its layer in the latest step",
    "dropped": "share of the choices of experts that were dropped in the latest step",
}


class Gauges:
    """A sink that sets ``raypar_loss`` and other gauges, tagged ``run``, ``job`` and ``user``.

    Each rank's memory is also tagged ``pp``, and each auxiliary loss ``kind``.

    Args:
        run: The run's name.
        job: The job's name, which keeps runs of one name apart.
    """

    def __init__(self, run: str, job: str) -> None:
        self._tags = {"run": run, "job": job, "user": user_name()}
        tags = tuple(self._tags)
        self._gauges = {name: gauge(f"raypar_{name}", what, tags) for name, what in _GAUGES.items()}
        self._aux = gauge("raypar_aux", "auxiliary losses of the latest step", (*tags, "kind"))
        self._memory = gauge("raypar_peak_memory_bytes", "largest memory of an actor in the latest step", (*tags, "pp"))

    def begin(self, config: dict[str, Any]) -> None: ...

    def write(self, outcome: dict[str, Any], step: int) -> None:
        for name in self._gauges.keys() & outcome.keys():
            if outcome[name] is not None:
                self._gauges[name].set(outcome[name], self._tags)
        for kind, value in outcome.get("aux", {}).items():
            self._aux.set(value, self._tags | {"kind": kind})
        for pp, size in enumerate(outcome.get("peak_memory", ())):
            self._memory.set(size, self._tags | {"pp": str(pp)})

    def close(self) -> None: ...
