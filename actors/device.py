"""Where an actor computes: on CPUs, or on a GPU. What differs between them is said here, so that nobody else asks."""

from __future__ import annotations

import ctypes
import os
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import nn

from raypar.actors.specs.results import Span
from raypar.actors.specs.types import DeviceKind
from raypar.actors.tensors import Values

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's <malloc.h>
_HUGE = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, for this process' whole life (glibc; elsewhere nothing happens).

    A step frees and takes the same activations again and again; giving them back to the system in between costs a page
    fault for each of their pages. One arena, because the thread that computes is not the main one.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, _HUGE)):
            mallopt(option, value)


class PeakMemory:
    """The high-water mark of this process' resident memory (Linux; elsewhere it is 0).

    The two files stay open: a step asks at its start and at its end, and opening them costs more than reading.
    """

    def __init__(self) -> None:
        try:
            files = os.open("/proc/self/clear_refs", os.O_WRONLY), os.open("/proc/self/status", os.O_RDONLY)
        except OSError:
            self._clear: int | None = None
        else:
            self._clear, self._status = files
            weakref.finalize(self, _close, files)

    def reset(self) -> None:
        """Start a new mark."""
        if self._clear is not None:
            os.pwrite(self._clear, b"5", 0)

    def read(self) -> int:
        """Most bytes since the last reset."""
        if self._clear is None:
            return 0
        _, _, rest = os.pread(self._status, 4096, 0).partition(b"VmHWM:")
        return int(rest.split(None, 1)[0]) * 1024 if rest else 0


def _close(files: tuple[int, ...]) -> None:
    for file in files:
        os.close(file)


class Place(ABC):
    """What an actor computes on.

    kind    as a plan spells it
    device  where its tensors are
    """

    kind: DeviceKind
    device: torch.device

    @abstractmethod
    def enter(self) -> None:
        """Let the calling thread compute here; an actor's calls come on any thread."""

    @abstractmethod
    def to(self, values: Values) -> Values:
        """Values that were made on the host, here."""

    @abstractmethod
    def settle(self, modules: Iterable[nn.Module]) -> None:
        """Move modules that were made on the host here, in place."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed what layers draw from."""

    @abstractmethod
    def ahead(self, *, rehearsed: bool) -> int:
        """How many receives are posted before their turn, so that their peer need not wait to be asked.

        rehearsed  whether the same actions were performed before
        """

    @abstractmethod
    def begin(self) -> None:
        """Open a step: its marks and its peak of memory."""

    @abstractmethod
    def mark(self) -> float:
        """This moment, for ``seconds``: on a GPU that at which it has done what it was given so far."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until everything is computed; from now on ``seconds`` and ``spans`` know every mark of the step."""

    @abstractmethod
    def seconds(self, mark: float) -> float:
        """When a mark was: seconds of this machine's clock."""

    @abstractmethod
    def spans(self, marked: list[Span]) -> list[Span]:
        """Spans between marks as spans of time."""

    @abstractmethod
    def peak(self) -> int:
        """The most bytes that were held since ``begin``."""


class Host(Place):
    """This machine's CPUs. What is done is done when the call returns, so a mark is the time itself."""

    kind: DeviceKind = "cpu"
    device = torch.device("cpu")
    mark = staticmethod(time.perf_counter)  # without a call in between: it is asked twice an action

    def __init__(self) -> None:
        self._memory = PeakMemory()

    def enter(self) -> None:
        """Every thread computes here."""

    def to(self, values: Values) -> Values:
        return values

    def settle(self, modules: Iterable[nn.Module]) -> None:
        """They are here."""

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def ahead(self, *, rehearsed: bool) -> int:
        return 2

    def begin(self) -> None:
        self._memory.reset()

    def finish(self) -> None:
        """It is computed."""

    def seconds(self, mark: float) -> float:
        return mark

    def spans(self, marked: list[Span]) -> list[Span]:
        return marked

    def peak(self) -> int:
        return self._memory.read()


class Cuda(Place):
    """A GPU. The host hands it work and goes on, so marks are events in its stream, timed when a step is over.

    index  among the GPUs that this process sees; Ray shows an actor its own only
    """

    kind: DeviceKind = "cuda"

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self._generator = self._demand_gpu(index)
        self._marks: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def enter(self) -> None:
        torch.cuda.set_device(self.device)

    def to(self, values: Values) -> Values:
        return tuple([value if value.device == self.device else self._moved(value) for value in values])

    def settle(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            module.to(self.device)

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)  # layers may draw on the host, too
        self._generator.manual_seed(seed)

    def ahead(self, *, rehearsed: bool) -> int:
        """One holds multiprocessors until it is over. None before every kernel was used once: to load one, CUDA waits
        for what runs, a receive among it, and two ranks could wait for each other."""
        return int(rehearsed)

    def begin(self) -> None:
        self._marks, self._times = [], []
        torch.cuda.reset_peak_memory_stats(self.device)

    def mark(self) -> float:
        self._marks.append(self._event())
        return float(len(self._marks) - 1)

    def finish(self) -> None:
        now = self._event()
        now.synchronize()
        end = time.perf_counter()
        self._times = [end - mark.elapsed_time(now) / 1e3 for mark in self._marks]

    def seconds(self, mark: float) -> float:
        return self._times[int(mark)]

    def spans(self, marked: list[Span]) -> list[Span]:
        return [span._replace(start=self.seconds(span.start), end=self.seconds(span.end)) for span in marked]

    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device))

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        """From pinned memory a copy waits for nothing that the GPU still has to do."""
        return (value.pin_memory() if value.device.type == "cpu" else value).to(self.device, non_blocking=True)

    def _demand_gpu(self, index: int) -> torch.Generator:
        """The generator of the GPU; raises RuntimeError if there is none."""
        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} finds no GPU in this process: see its CUDA build and driver")
        torch.cuda.init()
        return torch.cuda.default_generators[index]


def place_of(kind: DeviceKind) -> Place:
    """The place of this process for a kind of device; raises RuntimeError if it has none."""
    return Cuda() if kind == "cuda" else Host()
