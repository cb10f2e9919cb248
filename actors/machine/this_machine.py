"""The CPUs, memory, disk and torch of this machine, for the actors of a run."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from raypar.actors.machine.host_cores import num_cores
from raypar.actors.specs.types import DeviceChoice, DeviceKind

_LEAST_SLOTS = 16  # CPUs that a Ray of our own declares at least, so that many actors can share a laptop's few cores
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_NVIDIA = Path("/dev/nvidiactl")
_CUDA = re.compile(r"^cuda\b[^=]*= *(.*)$", re.MULTILINE)  # in torch/version.py


def num_slots() -> int:
    """Return the number of CPUs that a Ray of our own declares, and so the most actors that it starts here."""
    return max(num_cores(), _LEAST_SLOTS)


def starts_own_ray() -> bool:
    """Return whether a launch would start Ray on this machine, since no RAY_ADDRESS names a cluster."""
    return not os.environ.get("RAY_ADDRESS")


def actor_count_faults(num_actors: int, cpus: float = 1.0, factors: str = "") -> Iterator[str]:
    """Yield a fault if a launch would start a Ray of our own that has too few CPUs for so many actors.

    Args:
        num_actors: Number of actors.
        cpus: What each takes of the CPUs of Ray.
        factors: Of which product the number is; "" if that is not known.
    """
    most = int(num_slots() / cpus)
    if starts_own_ray() and num_actors > most:
        each = "" if cpus == 1 else f" with resources.cpus={cpus:g}"
        here = f"the {most} that this machine of {num_cores()} cores takes{each}"
        fewer = "" if cpus <= 1 else ", fewer CPUs"
        fix = f"use a smaller mesh{fewer}, or set RAY_ADDRESS to a cluster"
        product = f" ({factors})" if factors else ""
        yield f"mesh: {num_actors} actors{product} are more than {here}: {fix}"


@cache
def torch_has_cuda() -> bool | None:
    """Return whether the torch that is installed here is built with CUDA, without importing it; None if not known."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        found = _CUDA.search((Path(spec.origin).parent / "version.py").read_text())
    except OSError:
        return None
    return None if found is None else found[1].strip() != "None"


def lacks_device(device: DeviceChoice) -> bool:
    """Return whether no run with this setting can start on this machine: its torch is built without CUDA."""
    return device == "cuda" and torch_has_cuda() is False


def device_kind(device: DeviceChoice) -> DeviceKind:
    """Return on which kind of device actors would compute if they were started on this machine."""
    return "cuda" if device == "cuda" or (device == "auto" and _NVIDIA.exists()) else "cpu"


def computes_here(device: DeviceChoice) -> bool:
    """Return whether a launch would start actors that compute on this machine's CPUs, so that they need its memory."""
    return starts_own_ray() and device_kind(device) == "cpu"


def total_memory() -> int | None:
    """Return the bytes of memory that this machine has, or that a container may use; None if unknown."""
    found = _meminfo("MemTotal")
    with suppress(OSError, ValueError):  # "max" if there is no limit
        found.append(int((_CGROUP / "memory.max").read_text()))
    if not found:  # macOS
        with suppress(OSError, ValueError):
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)


def free_memory() -> int | None:
    """Return the bytes of memory that are free here, or that a container's limit leaves; None if unknown."""
    found = _meminfo("MemAvailable")
    with suppress(OSError, ValueError):  # "max" if there is no limit
        limit = int((_CGROUP / "memory.max").read_text())
        found.append(max(0, limit - int((_CGROUP / "memory.current").read_text())))
    return min(found, default=None)


def _meminfo(entry: str) -> list[int]:
    """Return the bytes of an entry of /proc/meminfo; [] if there is none."""
    with suppress(OSError):
        return [int(kb) << 10 for kb in re.findall(rf"^{entry}:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)]
    return []


def free_disk(folder: Path) -> int | None:
    """Return the bytes that are free on a folder's disk, if a launch would start actors here; None if unknown."""
    if starts_own_ray():
        with suppress(OSError, ValueError):
            return shutil.disk_usage(folder).free
    return None
