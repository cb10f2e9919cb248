"""The machine: its card, driver and libraries, and what the card could do by its data sheet."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from raypar.planner.hardware.peak_flops import data_sheet_of, peak_of_gpu

NO_CARD = "none (CPU)"


def peak_flops(card: str, dtype: str) -> tuple[float | None, str]:
    """Return the peak FLOP/s of a card in a dtype; None, and why, where it is not known."""
    if card in ("", NO_CARD):
        return None, "MFU: it needs a GPU"
    peak = peak_of_gpu(card, dtype)
    if peak is None:
        return None, f"MFU: raypar's tables have no {'fp32 ' * (data_sheet_of(card) is not None)}peak of {card}"
    return peak, ""


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
