"""The machine that a bench ran on."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch

_IDLE = 0.5  # a load above it disturbs what is measured


def processor() -> str:
    """Its name (Linux; elsewhere its kind)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> tuple[str, ...]:
    return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


@dataclass(frozen=True)
class Machine:
    """Where and when a bench begins.

    load  processes that wanted a core, on average over the minute before
    gpus  their names
    """

    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))
    processor: str = field(default_factory=processor)
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    load: float = field(default_factory=lambda: os.getloadavg()[0])
    python: str = field(default_factory=platform.python_version)
    torch: str = field(default_factory=lambda: version("torch"))
    ray: str = field(default_factory=lambda: version("ray"))
    gpus: tuple[str, ...] = field(default_factory=_gpus)

    def __str__(self) -> str:
        gpus = f"{len(self.gpus)} GPUs ({self.gpus[0]})" if self.gpus else "no GPU here"
        where = f"{self.date}, {self.processor}, {self.cores} cores, {gpus}"
        what = f"Python {self.python}, torch {self.torch}, ray {self.ray}"
        busy = f" Load {self.load:.1f} before it began: not to be published." if self.load > _IDLE else ""
        return f"{where}, {what}.{busy}"
