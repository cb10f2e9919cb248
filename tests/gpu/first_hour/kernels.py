"""Kernels of a step and the gaps between them, from torch's profiler."""

from __future__ import annotations

import json
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_LIMIT = 300.0  # seconds that a step may take, and what was recorded of it to be read
_SHOWN = 5  # kernels that are named


@dataclass(frozen=True)
class StepKernels:
    """The kernels that a GPU ran in a step.

    count    number of kernels
    span     seconds from the start of the first to the end of the last
    gap      seconds of these in which none ran: the GPU waited for the host
    longest  seconds by name of those that took most
    """

    count: int
    span: float
    gap: float
    longest: dict[str, float]


def step_kernels(events: Sequence[dict[str, Any]]) -> StepKernels:
    """Return the kernels among the events of a Chrome trace, whose times are microseconds."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    intervals = sorted((float(one["ts"]), float(one["ts"]) + float(one["dur"])) for one in kernels)
    gap, until = 0.0, intervals[0][0] if intervals else 0.0
    for start, end in intervals:
        gap += max(0.0, start - until)
        until = max(until, end)
    spent = Counter[str]()
    for one in kernels:
        spent[str(one["name"])] += float(one["dur"])
    span = until - intervals[0][0] if intervals else 0.0
    longest = {name: us / 1e6 for name, us in spent.most_common(_SHOWN)}
    return StepKernels(len(kernels), span / 1e6, gap / 1e6, longest)


class KernelRecorder:
    """Records the kernels of this process, whichever of its threads launch them, until ``end``.

    torch's profiler begins and ends in one thread, and the calls to an actor may come on any: it gets a thread of its
    own. CUDA's kernels are recorded for the whole process.
    """

    def __init__(self) -> None:
        self._begun, self._over = threading.Event(), threading.Event()
        self._found: StepKernels | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._record, daemon=True)
        self._thread.start()
        self._begun.wait(_LIMIT)

    def end(self) -> StepKernels:
        """Wait for what was launched, and return the kernels since the start. Raises what the profiler raised."""
        self._over.set()
        self._thread.join(_LIMIT)
        if self._error is not None:
            raise self._error
        assert self._found is not None, "the profiler is late"
        return self._found

    def _record(self) -> None:
        has_gpu = torch.cuda.is_available()
        try:
            with profile(activities=[ProfilerActivity.CUDA if has_gpu else ProfilerActivity.CPU]) as found:
                self._begun.set()
                self._over.wait(_LIMIT)
                if has_gpu:
                    torch.cuda.synchronize()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                found.export_chrome_trace(str(path))
                self._found = step_kernels(json.loads(path.read_text())["traceEvents"])
        except BaseException as error:
            self._error = error
        finally:
            self._begun.set()


def begin_in_actor(actor: Any) -> None:
    """Start to record in the process of an actor; ``actor`` is its instance."""
    actor.kernel_recorder = KernelRecorder()


def end_in_actor(actor: Any) -> StepKernels:
    """Return what was recorded in the process of an actor since ``begin_in_actor``."""
    found: StepKernels = actor.kernel_recorder.end()
    return found
