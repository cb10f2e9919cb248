"""What made a run: versions, host, commit and command line, at its start and each time it was resumed."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from raypar.actors.machine.files import read_plain
from raypar.actors.machine.host_cores import num_cores
from raypar.schedules.formatting import size

_MOST = 1 << 20  # bytes


def provenance_of_process(started: datetime) -> dict[str, Any]:
    """Return what this process is: versions, host, commit of the working directory, command line, and its start."""
    return {
        "raypar": _version("raypar"),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "ray": _version("ray"),
        "host": platform.node(),
        "hardware": _hardware(),
        "commit": _commit(),
        "command": list(sys.argv),
        "started": started.isoformat(timespec="seconds"),
    }


def renewed(path: Path, started: datetime, *, resumed: bool, known: bool) -> str:
    """Return the text of a provenance file for a run that begins now.

    Args:
        path: The file as it is now, if it is there.
        started: When its launch began, as the log says.
        resumed: Whether the run goes on in its folder: then what was there stays, and this time is added.
        known: Whether the folder was made by this run. Of an older run that has no such file the start is not known.
    """
    now = provenance_of_process(started)
    if not resumed:
        return json.dumps(now, indent=1) + "\n"
    past: dict[str, Any] = now if known else dict.fromkeys(now)
    again: list[Any] = [] if known else [now]
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_plain(path, _MOST))
        if isinstance(found, dict):
            before = found.pop("resumed", [])
            past, again = found, [*(before if isinstance(before, list) else []), now]
    return json.dumps({**past, "resumed": again}, indent=1) + "\n"


def _hardware() -> str:
    """Describe this machine: its cores, memory and GPUs, as Linux has them in its files."""
    parts = [f"{num_cores()} cores"]
    with suppress(OSError):
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        parts[0] += f" of {' '.join(names[0].split())}" if names else ""
    with suppress(OSError, ValueError):
        parts.append(f"{size(os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'))} memory")
    found = Counter[str]()
    with suppress(OSError):
        for file in Path("/proc/driver/nvidia/gpus").glob("*/information"):
            found.update(re.findall(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE))
    return ", ".join([*parts, *(f"{count} x {name}" for name, count in found.items())])


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _commit() -> str | None:
    """Return the commit that is checked out in the working directory; None without git or a checkout."""
    asked = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True).stdout.strip() or None
    return None
