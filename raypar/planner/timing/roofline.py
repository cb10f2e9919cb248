"""The one model of how long an operation takes: its FLOPs, and then its bytes.

An operation of so many FLOPs that reads and writes so many bytes of the device's memory takes

    FLOPs / (reached x peak) + bytes / (reached x bandwidth)

seconds: a serial roofline. The second term is why narrow products reach less of the peak than wide ones, as tensor
parallelism and small microbatches make them: a product of m x k and k x n moves mk + kn + mn elements for 2 mkn FLOPs.
Norms, activation functions, dropout and softmax have bytes alone. ``reached`` is the device's only constant.

A GPU makes a product's result in tiles, one on each of its multiprocessors at a time. Where the last round of tiles
fills few of them, the others wait, and the FLOPs take as long as those of full rounds. A product of fewer tiles than
multiprocessors divides its sum among several.

Source: Williams et al. 2009, "Roofline: An Insightful Visual Performance Model", whose maximum is a sum here; NVIDIA,
"Matrix Multiplication Background User's Guide", sections 3.1 and 3.2 (tile and wave quantization).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from raypar.planner.hardware.data_sheets import Device

_TILE = 256, 128  # of a result in half precision, in either direction; the guide's example on an A100


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

    def times(self, count: float) -> Work:
        """Return the work with so many times the FLOPs and bytes."""
        return Work(self.flops * count, self.bytes * count, self.kernels)


class Product(NamedTuple):
    """Products of ``rows`` x ``depth`` and ``depth`` x ``columns``, in one operation.

    Attributes:
        rows: Rows of a result.
        columns: Columns of a result.
        depth: The dimension that is summed.
        element: Bytes of an element.
        number: Number of such products.

    Examples:
        >>> Product(2, 3, 4, 2).work
        Work(flops=48.0, bytes=52.0, kernels=1)
    """

    rows: float
    columns: float
    depth: float
    element: int
    number: float = 1.0

    @property
    def work(self) -> Work:
        """Its FLOPs and bytes."""
        moved = self.rows * self.depth + self.depth * self.columns + self.rows * self.columns
        flops = 2.0 * self.rows * self.columns * self.depth * self.number
        return Work(flops, float(self.element * moved * self.number))

    @property
    def of_left(self) -> Product:
        """The product of its backward that makes the gradient of its left factor."""
        return self._replace(columns=self.depth, depth=self.columns)

    @property
    def of_right(self) -> Product:
        """The product of its backward that makes the gradient of its right factor, the weights of a linear layer."""
        return self._replace(rows=self.depth, depth=self.rows)

    def longer(self, units: int) -> float:
        """Return how many times as long its FLOPs take, as the last round of tiles does not fill all multiprocessors.

        Args:
            units: Number of multiprocessors; 0: results are not made in tiles.

        Examples:
            >>> round(Product(1792, 1536, 4096, 2).longer(108), 3)  # 84 tiles on 108
            1.286
        """
        return min(self._longer(units, *_TILE), self._longer(units, *_TILE[::-1])) if units else 1.0

    def _longer(self, units: int, high: int, wide: int) -> float:
        """Return the same for tiles that are so high and wide."""
        tiles = math.ceil(self.rows / high) * math.ceil(self.columns / wide) * math.ceil(self.number)
        parts = max(1, units // tiles)
        whole = math.ceil(tiles * parts / units) * units / parts
        return whole * high * wide / (self.rows * self.columns * self.number)


@dataclass(frozen=True)
class Roofline:
    """How fast a device works.

    Attributes:
        flops: FLOP/s that products reach.
        bandwidth: Bytes/s that its memory reaches.
        kernel: Seconds that an operation takes at least.
        units: Its multiprocessors; 0: it makes no tiles.
    """

    flops: float
    bandwidth: float
    kernel: float
    units: int = 0

    @classmethod
    def of(cls, device: Device, *, half: bool) -> Roofline:
        """Return the roofline of a device for bf16 and fp16, or for fp32."""
        peak = device.half if half else device.full
        return cls(device.reached * peak, device.reached * device.bandwidth, device.kernel, device.units)

    def seconds(self, does: Work | Product) -> float:
        """Return how long an operation takes."""
        longer, work = (does.longer(self.units), does.work) if isinstance(does, Product) else (1.0, does)
        return max(longer * work.flops / self.flops + work.bytes / self.bandwidth, work.kernels * self.kernel)
