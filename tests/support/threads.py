"""Threads that play actors, on one core: on two, each change of the thread that has Python's lock takes longer."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor


def threads(count):
    """A pool of so many threads on one core, another one for each process of tests."""
    return ThreadPoolExecutor(count, initializer=_stay_on_one_core)


def in_threads(items, call):
    """``call(item)`` of all items at once, each in a thread; the results in their order, or the first exception."""
    with threads(len(items)) as pool:
        futures = [pool.submit(call, item) for item in items]
        return [future.result(30) for future in futures]


def _stay_on_one_core():
    if hasattr(os, "sched_setaffinity"):
        process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[process % len(cores)]})
