"""How much an actor computes and moves in a second, before anything of its run was measured.

Figures of a kind of device, not of the machine that a run will have: they show how computing compares with messages.
Once steps were taken, predictions use their measured costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raypar.actors.machine.this_machine import device_kind
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind


@dataclass(frozen=True)
class Rates:
    """What one actor does in a second.

    Attributes:
        flops: FLOPs of the products in its layers.
        bytes: Bytes that it receives from the other actors of a group, or sends to them.
        latency: Seconds that an operation of a group takes in addition.
    """

    flops: float
    bytes: float
    latency: float

    def message(self, count: float, operations: float = 1.0) -> float:
        """Return the seconds of some bytes that are moved in so many operations; none if there are no bytes."""
        return count / self.bytes + operations * self.latency if count else 0.0


# A core of docs/benchmarks.md (2026-11-24): gpt-small on one actor makes 1,822 tokens/s of 44.4 MFLOP, and of 16 MiB
# two actors gather the other half in 2.2 ms and reduce it in 1.3, four three quarters in 3.8 and 3.7 ms. An H100 by its
# data sheet: 67 TFLOP/s in fp32, 989 in half precision, of which 0.5 are reached, and 0.6 of NVLink's 450 GB/s.
_FULL: Mapping[DeviceKind, Rates] = {"cpu": Rates(80e9, 4e9, 60e-6), "cuda": Rates(33e12, 270e9, 20e-6)}
_HALF: Mapping[DeviceKind, Rates] = {"cpu": _FULL["cpu"], "cuda": Rates(490e12, 270e9, 20e-6)}
# The fastest of 60 steps of gpt-tiny on one actor, other programs beside it, took 39.5 ms for 8 blocks x 4
# microbatches, and 11.5 ms for 2 blocks (2026-11-26): 1.2 ms each; by their FLOPs 0.1.
_BLOCK: Mapping[DeviceKind, float] = {"cpu": 1e-3, "cuda": 0.0}


def block_seconds(run: Run) -> float:
    """Return the seconds that a block's forward and backward of a microbatch take at least, however small they are."""
    return _BLOCK[device_kind(run.device)]


def rates_of(run: Run) -> Rates:
    """Return the rates of the devices that a run would have if its actors were started on this machine."""
    return (_HALF if run.precision.is_half else _FULL)[device_kind(run.device)]


# On one actor of this machine (2026-11-27), blocks of 64 to 512 wide with 64 to 128 tokens took 0.80, 1.20, 2.24 and
# 3.96 ms longer, forwards and both halves together, for 8, 33, 74 and 262 thousand elements.
_HALVES: Mapping[DeviceKind, tuple[float, float]] = {"cpu": (0.8e-3, 1.2e-8), "cuda": (0.0, 0.0)}


def halving_seconds(run: Run, elements: float) -> float:
    """Return the seconds that a block's forward and backward take longer where the backward is split into halves.

    Args:
        run: The run.
        elements: Elements of the residual stream of a microbatch.
    """
    fixed, each = _HALVES[device_kind(run.device)]
    return fixed + each * elements
