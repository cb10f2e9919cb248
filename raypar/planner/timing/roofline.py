"""The one model of how long an operation takes: its FLOPs, and then its bytes.

An operation of so many FLOPs that reads and writes so many bytes of the device's memory takes

    FLOPs / (reached x peak) + bytes / (reached x bandwidth)

seconds: a serial roofline. The second term is why narrow products reach less of the peak than wide ones, as tensor
parallelism and small microbatches make them: a product of m x k and k x n moves mk + kn + mn elements for 2 mkn FLOPs.
Norms, activation functions, dropout and softmax have bytes alone. ``reached`` is the device's only constant.

Source: Williams et al. 2009, "Roofline: An Insightful Visual Performance Model", whose maximum is a sum here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from raypar.planner.hardware.devices import Device


class Work(NamedTuple):
    """What an operation does.

    Attributes:
        flops: Its FLOPs.
        bytes: Bytes of the device's memory that it reads and writes.
        kernels: Operations of the device that it takes.
    """

    flops: float
    bytes: float
    kernels: int = 1

    def times(self, flops: float, nbytes: float | None = None) -> Work:
        """Return the work with so many times the FLOPs, and as many times the bytes or so many."""
        return Work(self.flops * flops, self.bytes * (flops if nbytes is None else nbytes), self.kernels)


def product(rows: float, columns: float, depth: float, element: int, count: float = 1.0) -> Work:
    """Return the work of products of ``rows`` x ``depth`` and ``depth`` x ``columns``.

    Args:
        rows: Rows of the result.
        columns: Columns of the result.
        depth: The dimension that is summed.
        element: Bytes of an element.
        count: Number of such products, in one operation.

    >>> product(2, 3, 4, 2)
    Work(flops=48.0, bytes=52.0, kernels=1)
    """
    moved = rows * depth + depth * columns + rows * columns
    return Work(2.0 * rows * columns * depth * count, float(element * moved * count))


@dataclass(frozen=True)
class Roofline:
    """How fast a device works.

    Attributes:
        flops: FLOP/s that products reach.
        bandwidth: Bytes/s that its memory reaches.
        kernel: Seconds that an operation takes at least.
    """

    flops: float
    bandwidth: float
    kernel: float

    @classmethod
    def of(cls, device: Device, *, half: bool) -> Roofline:
        """Return the roofline of a device for bf16 and fp16, or for fp32."""
        peak = device.half if half else device.full
        return cls(device.reached * peak, device.reached * device.bandwidth, device.kernel)

    def seconds(self, work: Work) -> float:
        """Return how long an operation takes."""
        return max(work.flops / self.flops + work.bytes / self.bandwidth, work.kernels * self.kernel)
