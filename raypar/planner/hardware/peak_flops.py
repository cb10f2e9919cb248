"""The peak FLOP/s of devices by their data sheets, and which data sheet is that of a GPU."""

from __future__ import annotations

import re
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
# What torch calls a GPU -> its name here; the first that is found counts.
_NAMES: tuple[tuple[str, DeviceName], ...] = (
    (r"\bH100 PCIe", "h100-pcie"),
    (r"\bH100 (?!NVL)|\bH100$", "h100"),  # the NVL's peak is another, and GH200 and GB200 are other GPUs, too
    (r"\bH200\b", "h200"),
    (r"\bB200\b", "b200"),
    (r"A100", "a100"),
    (r"L40S", "l40s"),
    (r"L4\b", "l4"),
    (r"A10\b|A10G", "a10"),
    (r"V100", "v100"),
    (r"Tesla T4|\bT4\b", "t4"),
    (r"RTX 4090\b", "rtx4090"),
)


def peak_of(peak: float | DeviceName | None) -> float | None:
    """Return peak FLOP/s, of a device or as they are; None for None.

    Args:
        peak: Name of a device, or FLOP/s.

    Source: NVIDIA's data sheets.
    """
    if not isinstance(peak, str):
        return peak
    return DEVICES[peak].half if peak in DEVICES else _OTHERS[peak]


def data_sheet_of(gpu: str) -> DeviceName | None:
    """Return the name of the data sheet of a GPU; None if there is none, as of a part of one (MIG).

    Args:
        gpu: What torch calls the GPU, as "NVIDIA H100 80GB HBM3".
    """
    return next((name for pattern, name in _NAMES if re.search(pattern, gpu) and "MIG" not in gpu), None)


def peak_of_gpu(gpu: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of a GPU in a dtype; None if no data sheet has it.

    Args:
        gpu: What torch calls the GPU.
        dtype: The dtype of the products, as "bf16" or "fp32".
    """
    name = data_sheet_of(gpu)
    if name is None or (dtype == "fp32" and name not in DEVICES):
        return None
    return DEVICES[name].full if dtype == "fp32" else peak_of(name)
