"""A Ray on this machine for the bench: one cluster for all that live at the same time, so that the idle stay quiet."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

# As raypar starts Ray, for everybody: Ray's own niceness of 15 would let any other process go first.
QUIET = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_LOG_TO_DRIVER_EVENT_LEVEL": "ERROR",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
_SLOTS = 32  # actors of all contestants; they take turns


@contextmanager
def local_ray(**options: Any) -> Iterator[None]:
    """A cluster that this process is connected to, and that its children find in RAY_ADDRESS.

    A Ray that this process is connected to already stays as it is, and is not ended. Else ``options`` are further ones
    of ray.init.
    """
    if ray.is_initialized():
        with _address_in_environment():
            yield
        return
    ray.init(
        address="local",
        num_cpus=_SLOTS,
        namespace="raypar",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=256 * 2**20,
        **options,
    )
    terminable()
    try:
        with _address_in_environment():
            yield
    finally:
        ray.shutdown()


@contextmanager
def _address_in_environment() -> Iterator[None]:
    """Within it the children of this process find its Ray."""
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    try:
        yield
    finally:
        del os.environ["RAY_ADDRESS"]


def terminable() -> None:
    """Let SIGTERM unwind this process; ray.init, which sets handlers of its own, has to be followed by it."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def quiet() -> None:
    """Set what every Ray of this process and its children is started with; a cluster of the user's is left alone."""
    os.environ.pop("RAY_ADDRESS", None)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
