"""What devices could do by their data sheets: peak FLOP/s of dense matrix products in half precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

DeviceName = Literal["v100", "t4", "a10", "a100", "l4", "l40s", "rtx4090", "h100-pcie", "h100", "h200", "b200"]
PEAKS: Mapping[DeviceName, float] = {  # of bf16, or fp16 where there is no bf16; without sparsity
    "v100": 125e12,
    "t4": 65e12,
    "a10": 125e12,
    "a100": 312e12,
    "l4": 121e12,
    "l40s": 362e12,
    "rtx4090": 165e12,
    "h100-pcie": 756e12,
    "h100": 989e12,
    "h200": 989e12,
    "b200": 2250e12,
}


def peak_of(peak: float | DeviceName | None) -> float | None:
    """Return peak FLOP/s, of a device or as they are; None for None.

    Args:
        peak: Name of a device, or FLOP/s.

    Source: NVIDIA's data sheets.
    """
    return PEAKS[peak] if isinstance(peak, str) else peak
