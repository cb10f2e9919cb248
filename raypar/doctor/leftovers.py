"""What raypar's own Rays left whose driver is gone: processes and session folders. They can be ended."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from raypar.actors.machine.process_identity import open_process, own_identity, process_began
from raypar.actors.machine.system_features import has_feature
from raypar.cluster.ray_private import OWNER_FILE, ray_folder
from raypar.doctor.finding import Finding

_PROC = Path("/proc")
_GRACE = 3.0  # seconds between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Leftover:
    """A session of a Ray that raypar started and whose driver is gone.

    Attributes:
        folder: Its session folder.
        owner: The file that names its driver.
        processes: Those of this user that still run with it, by number, and when each began.
    """

    folder: Path
    owner: Path
    processes: dict[int, int]


def leftovers(root: Path | None = None) -> list[Leftover]:
    """Return the leftovers of this user; none where the system has no list of processes that can be read.

    Args:
        root: The folder of Ray's sessions; None for the usual one.
    """
    if not has_feature("process_list") or not own_identity().pid_domain:
        return []
    gone = ((folder, owner) for folder, owner, driver, began in _owned(root) if process_began(driver) != began)
    return [Leftover(folder, owner, _processes(folder)) for folder, owner in gone]


def own_sessions() -> set[Path]:
    """Return the session folders of the Rays that this process has started."""
    own = own_identity()
    return {folder for folder, _, *driver in _owned(None) if driver == [own.pid, own.began]}


def _owned(root: Path | None) -> list[tuple[Path, Path, int, int]]:
    """Return the session folders of this user's Rays that raypar started, with the file, pid and begin of the driver.

    Those of other machines and containers that share the folder are not among them, nor those of an earlier boot.
    """
    found, here, root = [], own_identity().pid_domain, ray_folder() if root is None else root
    for owner in sorted([*root.glob(f"session_*/{OWNER_FILE}"), *root.glob(f"{OWNER_FILE}-*")]):
        with suppress(OSError, ValueError):
            if owner.stat().st_uid != os.getuid() or owner.is_symlink():
                continue
            driver, began, where = owner.read_text().split(" ")  # the last one is empty on other systems than Linux
            folders = [owner.parent]
            if owner.parent == root:  # Ray's start was interrupted
                folders = [one for one in root.glob(f"session_*_{int(driver)}") if not (one / OWNER_FILE).exists()]
            if where == here:
                found += [(folder, owner, int(driver), int(began)) for folder in folders]
    return found


def _processes(folder: Path) -> dict[int, int]:
    """Return this user's processes that were given a session folder as Ray's are, and when they began.

    All of Ray's have it in an option, ``--log-dir=FOLDER/logs``. Who reads a log there, or a shell whose command names
    the folder, is no process of Ray's.
    """
    found, given = {}, re.compile(rb"--[\w-]+=" + re.escape(os.fsencode(folder)) + rb"(?![\w.-])")
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                own = entry.stat().st_uid == os.getuid()
                words = (entry / "cmdline").read_bytes().split(b"\0")
                began = process_began(int(entry.name))
                if own and began is not None and any(map(given.match, words)):
                    found[int(entry.name)] = began
    return found


def leftover_findings(found: list[Leftover]) -> Iterator[Finding]:
    """Yield how much there is of leftovers."""
    running = sum(len(one.processes) for one in found)
    if not has_feature("process_list"):
        text = f"not looked for: /proc says what they are, which this system ({sys.platform}) lacks"
        yield Finding("ok", "leftovers", text)
    elif running:
        text = f"{running} processes of {sum(bool(one.processes) for one in found)} Rays whose driver is gone still run"
        yield Finding("wrong", "leftovers", text, "raypar doctor --sweep ends them, and removes their folders")
    elif found:
        text = f"{len(found)} session folders of Rays that are over, in {found[0].folder.parent}"
        yield Finding("note", "leftovers", text, "raypar doctor --sweep removes them")
    else:
        yield Finding("ok", "leftovers", "none")


def sweep(found: list[Leftover]) -> Iterator[Finding]:
    """End leftover processes and remove their folders; yield what was done."""
    if not has_feature("process_list"):
        yield from leftover_findings(found)
        return
    ended = 0
    for one in found:
        for number in (signal.SIGTERM, signal.SIGKILL):
            ended += number == signal.SIGTERM and len(one.processes)
            _signal(one.processes, number)
            _await_end(one.processes)
        shutil.rmtree(one.folder, ignore_errors=True)
        with suppress(OSError):
            one.owner.unlink(missing_ok=True)
    left = [pid for one in found for pid, began in one.processes.items() if process_began(pid) == began]
    if left:
        text = f"processes {', '.join(map(str, left))} do not end"
        yield Finding("wrong", "leftovers", text, "they wait for a device or a disk: see their state in top")
    yield Finding("ok", "leftovers", f"{ended - len(left)} processes were ended, {len(found)} folders removed")


def _signal(processes: dict[int, int], number: signal.Signals) -> None:
    """Send a signal to those processes that are still the same ones."""
    for pid, began in processes.items():
        with suppress(OSError):
            opened = open_process(own_identity()._replace(pid=pid, began=began))
            try:
                signal.pidfd_send_signal(opened, number)
            finally:
                os.close(opened)


def _await_end(processes: dict[int, int]) -> None:
    end = time.monotonic() + _GRACE
    while time.monotonic() < end and any(process_began(pid) == began for pid, began in processes.items()):
        time.sleep(0.05)
