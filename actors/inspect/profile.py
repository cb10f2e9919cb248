"""Profiles of an actor's training steps: torch's profiler, with the actions as named ranges."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from raypar.actors.inspect.profile_file import SUFFIX, add_step
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.machine.files import sync_folder, write_whole
from raypar.actors.specs.results import StepResult
from raypar.schedules.action import Action

_ALLOCATIONS = ".memory.pickle"
_UNNAMED = nullcontext()
_IS_RECORDING = threading.Lock()  # two profilers at a time in threads of one process are a segmentation fault


class StepProfiler:
    """Records the training steps of an actor that its run asks for, each from its first action to its end.

    Every step is recorded by itself and written when it is over, so that a failure loses no other one. It is the
    profiler of ``torch.autograd.profiler``, on which torch.profiler is built: the first start of the latter imports
    torch's compiler, which takes 1.5 s and 829 modules (2026-11-30, torch 2.13).

    torch records the thread that computes, and of a GPU all kernels. The allocations of a GPU's memory in these steps
    are in a file of their own, for torch's viewer.

    Args:
        steps: The first and the last step, counted from 1; None for none.
        folder: Folder of the profiles of the run; None for none.
        actor: The actor's name.
        rank: Its rank.
        size: Number of all ranks.
        device: The device that it computes on.

    Attributes:
        named: Returns the context in which an action is performed.
    """

    def __init__(
        self, steps: tuple[int, int] | None, folder: str | None, actor: str, rank: int, size: int, device: ComputeDevice
    ) -> None:
        self.named: Callable[[Action], AbstractContextManager[object]] = _unnamed
        self._first, self._last = steps if steps is not None and folder is not None else (0, -1)
        self._path = Path(folder or "") / f"{actor}{SUFFIX}"
        self._actor, self._device, self._gpu = actor, device, "cuda" if device.kind == "cuda" else None
        self._ranks = {"rank": rank, "world_size": size}

    def records(self, step: int, count: int) -> bool:
        """Return whether the run asks for a record of a step, counted from 0, or of one of ``count`` that overlap."""
        return self._first <= step + count and step + 1 <= self._last

    def take(self, step: int, count: int, take: Callable[[], StepResult]) -> StepResult:
        """Take a step, or several that overlap, and record and write it.

        Args:
            step: The number of the first one, counted from 0.
            count: Number of steps, which are recorded together, under the number of the last one.
            take: Takes it.

        Returns:
            The result of ``take``, with what has become of the profile.
        """
        if not _IS_RECORDING.acquire(blocking=False):
            return replace(take(), profile="torch records one thread of a process, now that of another actor")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes two lines for each step to stderr
        self._device.record_allocations(on=True)
        try:
            self.named = self._range
            # Tools find the steps in a trace by this name.
            with profile(use_device=self._gpu) as recorder, record_function(f"ProfilerStep#{step + count}"):
                result = take()
            return replace(result, profile=self._written(recorder, step + count))
        finally:
            self.named = _unnamed
            if step + count >= self._last:
                self._device.record_allocations(on=False)
            _IS_RECORDING.release()

    def _written(self, recorder: profile, step: int) -> str:
        """Write what was recorded of a step, counted from 1. Returns "", or why it can't be written."""
        try:
            if self._path.parent.is_symlink():
                return f"{str(self._path.parent)!r} is a symbolic link, and raypar writes through none: remove it"
            with tempfile.TemporaryDirectory() as folder:
                exported = Path(folder) / "trace.json"
                recorder.export_chrome_trace(str(exported))
                trace = json.loads(exported.read_bytes())
            add_step(self._path, self._head(trace), step, [*self._events(trace["traceEvents"])])
            if (allocations := self._device.allocations()) is not None:
                write_whole(self._path.parent / f"{self._actor}{_ALLOCATIONS}", [memoryview(allocations)])
                sync_folder(self._path.parent)
        except (OSError, ValueError) as error:  # torch may write an op's name that is no JSON
            return f"{str(self._path)!r} can't be written ({getattr(error, 'strerror', None) or error})"
        return ""

    def _head(self, trace: dict[str, Any]) -> dict[str, Any]:
        """Return what the file says of all steps."""
        copied = ("schemaVersion", "deviceProperties", "displayTimeUnit", "baseTimeNanoseconds")
        return {name: trace[name] for name in copied if name in trace} | {
            "actor": self._actor,
            "distributedInfo": self._ranks,
        }

    def _events(self, events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the events by the clock of the driver's machine, without those of the profiler itself."""
        ahead, own = self._device.wall_offset * 1e6, os.getpid()
        for event in events:
            if not isinstance(event.get("pid"), int):
                continue
            if event["name"] == "process_name" and event["pid"] == own:
                event["args"] = {"name": self._actor}
            yield {**event, "ts": event["ts"] + ahead} if ahead and "ts" in event else event

    @contextmanager
    def _range(self, action: Action) -> Iterator[None]:
        """Name what an action does, in the trace, and for tools that read NVTX (Nsight Systems)."""
        name = str(action)
        with torch.cuda.nvtx.range(name) if self._gpu else _UNNAMED, record_function(name):
            yield


def _unnamed(action: Action) -> AbstractContextManager[object]:
    """Return the context of an action that is not recorded."""
    return _UNNAMED
