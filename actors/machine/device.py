"""The device on which an actor computes, a CPU or a GPU. All differences between the two are in this file."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raypar.actors.autograd.torch_private import memory_history, record_memory_history
from raypar.actors.specs.precision import FP8_CAPABILITY
from raypar.actors.specs.results import Span
from raypar.actors.specs.types import DeviceKind
from raypar.actors.tensors import Values
from raypar.schedules.timeline import Call

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's <malloc.h>
_HUGE = (1 << 31) - 1
_MOST_EVENTS = 200_000  # allocations and frees of a record, the latest ones
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch's settings of its allocator, by a user
_MAXIMUM_UNIT = 1 if sys.platform == "darwin" else 1 << 10  # bytes; the unit of getrusage's ru_maxrss
_VM_HWM = re.compile(rb"^VmHWM:\s*(\d+) kB$", re.MULTILINE)
_STATUS = 1 << 14  # bytes of one read of /proc/self/status

ALL_BLOCKS = 1 << 30  # for ``keep_freed_memory``
SMALL_BLOCKS = 1 << 18
BLOCKS_OF_A_STEP = 1 << 22  # with sharded weights or gradients, which are larger or few


def keep_freed_memory(below: int) -> None:
    """Make the C library keep freed blocks of memory that are smaller than a size (glibc only).

    Every step allocates and frees the same activations. Returning them to the system in between costs a page fault per
    page. But a kept block is divided into pieces, which are soon too small for another block of its size. A launch
    allocates and frees each weight once, and a step with sharded weights or gradients frees large blocks often: then
    large blocks are returned. There is one arena, because the thread that computes is not the main thread.

    Args:
        below: Size in bytes from which a freed block is returned at once. Blocks that are kept now are returned.
    """
    libc = ctypes.CDLL(None)
    if (mallopt := getattr(libc, "mallopt", None)) is not None:
        for option, value in ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, below), (_M_TRIM_THRESHOLD, _HUGE)):
            mallopt(option, value)
    if (trim := getattr(libc, "malloc_trim", None)) is not None:
        trim(0)


def resident_memory() -> int:
    """Return the resident bytes of this process; without /proc (macOS) the peak since its begin."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return largest_memory()


def largest_memory() -> int:
    """Return the peak of resident bytes of this process since its begin."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXIMUM_UNIT


class PeakMemory:
    """Peak resident memory of this process since a reset; without /proc (macOS) since its begin.

    It keeps its two files open: every step uses them at its start and end, and opening them costs more than reading.
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
        """Start a new peak."""
        if self._clear is not None:
            os.pwrite(self._clear, b"5", 0)

    def read(self) -> int:
        """Return the peak since the last reset, in bytes."""
        if self._clear is None:
            return largest_memory()
        text = b""
        while not (found := _VM_HWM.search(text)) and (more := os.pread(self._status, _STATUS, len(text))):
            text += more  # the line comes after the groups of the process, of which there may be thousands
        return int(found[1]) * 1024 if found else 0


def _close(files: tuple[int, ...]) -> None:
    for file in files:
        os.close(file)


class ComputeDevice:
    """The device on which an actor computes. This class is the CPUs of this machine, ``Cuda`` is a GPU.

    On CPUs work is complete when the call returns, so a mark is the time itself.

    Attributes:
        kind: Kind of device, in a plan's spelling.
        device: Device of the actor's tensors.
        clock_offset: Seconds from this machine's clock to that of the driver's machine.
        wall_offset: The same of the clocks that show the time of day.
    """

    kind: DeviceKind = "cpu"
    device = torch.device("cpu")
    clock_offset: float = 0.0
    wall_offset: float = 0.0

    def __init__(self) -> None:
        self._memory = PeakMemory()

    @property
    def gpu(self) -> tuple[str, str]:
        """What torch calls this GPU, and its identity; "" for CPUs."""
        return "", ""

    def enter(self) -> None:
        """Prepare the calling thread to compute on the device. An actor's calls may run on any thread."""

    def to(self, values: Values) -> Values:
        """Move values from the host to this device."""
        return values

    def read_back(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to copy a tensor to the host, and return a function that waits for the copy and returns it.

        The copy follows the work issued so far. A wait for later work of the device includes the wait for it.
        """
        return lambda: value

    def demand_fp8(self) -> None:
        """Raise ValueError if this is a GPU that does not multiply numbers in fp8."""

    def record_allocations(self, *, on: bool) -> None:
        """Start or stop to record where memory of a GPU is allocated and freed, for ``allocations``."""

    def allocations(self) -> bytes | None:
        """Return the recorded allocations of a GPU and its memory now, which torch's viewer shows; None for CPUs.

        They are a pickle of plain data, as https://pytorch.org/memory_viz reads it. raypar never reads it.
        """
        return None

    def choose_products(self, *, tf32: bool) -> None:
        """Choose whether fp32 matrices and convolutions are multiplied in TF32; only GPUs have it."""

    def settle(self, modules: Iterable[nn.Module]) -> None:
        """Move modules from the host to this device, in place."""

    def seed(self, seed: int) -> None:
        """Seed the generators from which layers draw."""
        torch.default_generator.manual_seed(seed)

    def ahead(self, *, rehearsed: bool) -> int:
        """Return the number of receives to post early, so that their peers need not wait.

        Args:
            rehearsed: Whether the same actions have run before.
        """
        return 2

    def begin(self) -> None:
        """Start a step: reset its marks and its peak of memory."""
        self._memory.reset()

    # A mark of this moment, for ``seconds``: on a GPU, the completion of the work issued so far. It is called twice per
    # action, so without a wrapper.
    mark: Callable[[], float] = staticmethod(time.perf_counter)

    def finish(self) -> None:
        """Wait until all work is complete. Afterwards ``seconds`` and ``spans`` can convert the step's marks."""

    def seconds(self, mark: float) -> float:
        """Return the time of a mark, in seconds of this machine's clock (``time.perf_counter``)."""
        return mark

    def spans(self, marked: list[Span]) -> list[Span]:
        """Convert spans between marks to spans of time, by the clock of the driver's machine."""
        return self._converted(marked, lambda mark: mark + ahead) if (ahead := self.clock_offset) else marked

    def _converted(self, marked: list[Span], seconds: Callable[[float], float]) -> list[Span]:
        def within(calls: tuple[Call, ...]) -> tuple[Call, ...]:
            return tuple(Call(name, seconds(start), seconds(end)) for name, start, end in calls)

        return [
            span._replace(start=seconds(span.start), end=seconds(span.end), calls=within(span.calls)) for span in marked
        ]

    def peak(self) -> int:
        """Return the peak of memory since ``begin``, in bytes."""
        return self._memory.read()


class Cuda(ComputeDevice):
    """A GPU. It runs asynchronously, so marks are events in its stream, whose times are read at the end of a step.

    Args:
        index: Index among the GPUs that this process sees; Ray shows an actor only its own.
    """

    kind: DeviceKind = "cuda"

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self._generator = self._demand_gpu(index)
        self._marks: list[torch.cuda.Event] = []
        self._times: list[float] = []

    @property
    def gpu(self) -> tuple[str, str]:
        found = torch.cuda.get_device_properties(self.device)
        return found.name, str(found.uuid)

    def enter(self) -> None:
        torch.cuda.set_device(self.device)

    def to(self, values: Values) -> Values:
        return tuple([value if value.device == self.device else self._moved(value) for value in values])

    def read_back(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        return super().read_back(value) if value.device.type == "cpu" else partial(_waited, *self._pinned(value))

    def demand_fp8(self) -> None:
        if torch.cuda.get_device_capability(self.device) < FP8_CAPABILITY:
            kind = torch.cuda.get_device_name(self.device)
            raise ValueError(
                f"precision.compute is 'fp8', which this GPU, {kind}, does not multiply: set it to 'bf16', or "
                "resources.accelerator_type to H100, say"
            )

    def record_allocations(self, *, on: bool) -> None:
        record_memory_history(_MOST_EVENTS if on else 0)

    def allocations(self) -> bytes | None:
        return memory_history()

    def choose_products(self, *, tf32: bool) -> None:
        cudnn: Any = torch.backends.cudnn
        chosen: tuple[Any, ...] = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
        for products in chosen:
            products.fp32_precision = "tf32" if tf32 else "ieee"

    def settle(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            module.to(self.device)

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)  # layers may also draw on the host
        self._generator.manual_seed(seed)

    def ahead(self, *, rehearsed: bool) -> int:
        """Return 1 once every kernel has been used, before that 0.

        A posted receive occupies multiprocessors until it is complete. To load a kernel, CUDA waits for all running
        kernels, including receives, so two ranks could wait for each other in their first pass.
        """
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
        return self._converted(marked, lambda mark: self.seconds(mark) + self.clock_offset)

    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device))

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        """Copy a value to the GPU through pinned memory, so that the copy does not wait for the GPU's queued work."""
        return (value.pin_memory() if value.device.type == "cpu" else value).to(self.device, non_blocking=True)

    def _pinned(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Start to copy a value of the GPU into pinned memory; return the copy, and the event of its completion."""
        copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
        return copy, self._event()

    def _demand_gpu(self, index: int) -> torch.Generator:
        """Return the GPU's generator. Raises RuntimeError if there is no GPU.

        Its memory is in segments that grow, so that less of it is lost between blocks, if the environment says nothing.
        """
        if not any(name in os.environ for name in _ALLOCATOR):
            os.environ[_ALLOCATOR[0]] = "expandable_segments:True"  # torch reads it when it first allocates
        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} finds no GPU in this process: see its CUDA build and driver")
        torch.cuda.init()
        return torch.cuda.default_generators[index]


def _waited(copy: torch.Tensor, completed: torch.cuda.Event) -> torch.Tensor:
    completed.synchronize()
    return copy


def device_of(kind: DeviceKind) -> ComputeDevice:
    """Return this process's device of a kind. Raises RuntimeError if it has none."""
    return Cuda() if kind == "cuda" else ComputeDevice()
