"""The machine: its card, driver and libraries, and what the card could do by its data sheet."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from raypar.planner.hardware.data_sheets import DEVICES
from raypar.reporting.html.flops import DeviceName, peak_of

NO_CARD = "none (CPU)"
# What torch calls a card -> its name in raypar's tables of peaks; the first that is found counts.
_NAMES: tuple[tuple[str, DeviceName], ...] = (
    (r"\bH100 PCIe", "h100-pcie"),
    (r"\bH100 (?!NVL)|\bH100$", "h100"),  # the NVL's peak is another, and GH200 and GB200 are other cards, too
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


def known_name(card: str) -> DeviceName | None:
    """Return a card's name in raypar's tables of peaks; None if they lack it."""
    return next((name for pattern, name in _NAMES if re.search(pattern, card)), None)


def peak_flops(card: str, dtype: str) -> tuple[float | None, str]:
    """Return the peak FLOP/s of a card in a dtype; None, and why, where it is not known."""
    if card in ("", NO_CARD):
        return None, "MFU: it needs a GPU"
    name = known_name(card)
    if name is None:
        return None, f"MFU: raypar's tables have no peak of {card}"
    if dtype != "fp32":
        return peak_of(name), ""
    if name not in DEVICES:
        return None, f"MFU: raypar's tables have no fp32 peak of {card}"
    return DEVICES[name].full, ""


def memory_in_use() -> tuple[float, float] | None:
    """Return GiB that are in use on the first GPU, and all that it has; None where nvidia-smi does not say.

    torch would say it too, but it would take some of the memory for that.
    """
    lines = _ask_driver("memory.used,memory.total")
    try:
        used, total = (float(number) / 1024 for number in lines[0].split(","))
    except (IndexError, ValueError):
        return None
    return used, total


def machine_facts() -> dict[str, Any]:
    """Return what a reader of the table must know of the machine."""
    import torch
    import torch.distributed as dist

    from tests.bench.machine import processor

    has_gpu = torch.cuda.is_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_gpu and dist.is_nccl_available() else "none"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "card": torch.cuda.get_device_name(0) if has_gpu else NO_CARD,
        "gpus": torch.cuda.device_count(),
        "memory_gib": torch.cuda.get_device_properties(0).total_memory / 2**30 if has_gpu else 0.0,
        "driver": next(iter(_ask_driver("driver_version")), "none"),
        "cuda": torch.version.cuda or "none",
        "nccl": nccl,
        "torch": torch.__version__,
        "ray": _version("ray"),
        "python": platform.python_version(),
        "processor": processor(),
    }


def _ask_driver(what: str) -> list[str]:
    """Return a line for each GPU; none where nvidia-smi is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    ask = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.splitlines()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
