"""What devices could do by their data sheets: peak FLOP/s of dense matrix products in half precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from raypar.planner.hardware.data_sheets import DEVICES

DeviceName = Literal["v100", "t4", "a10", "a100", "l4", "l40s", "rtx4090", "h100-pcie", "h100", "h200", "b200"]
_OTHERS: Mapping[str, float] = {  # of which no plan needs more than this
    "v100": 125e12,  # fp16, as it has no bf16; so has the T4
    "t4": 65e12,
    "a10": 125e12,
    "l40s": 362e12,
    "rtx4090": 165e12,
    "h100-pcie": 756e12,
}


def peak_of(peak: float | DeviceName | None) -> float | None:
    """Return peak FLOP/s, of a device or as they are; None for None.

    Args:
        peak: Name of a device, or FLOP/s.

    Source: NVIDIA's data sheets.
    """
    if not isinstance(peak, str):
        return peak
    return DEVICES[peak].half if peak in DEVICES else _OTHERS[peak]
