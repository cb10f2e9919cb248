"""Why an actor has died: from its process, from what Ray says, and from its log. Nothing of it waits for long."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from raypar.actors.errors import first_line
from raypar.cluster.processes import Exit, Processes
from raypar.cluster.ray_private import logs_folder
from raypar.errors import Death

_LINES = 12  # of a log that are told
_MOST = 1 << 16  # bytes of it that are read
_LONGEST = 300  # characters of a line

_PID = re.compile(r"\bpid: (\d+)")
_IP = re.compile(r"\bip: (\S+)")
_MEMORY = re.compile(r"was ([\d.]+ ?\wB) used / ([\d.]+ ?\wB) limit")
_EXIT_CODE = re.compile(r"exits with an exit code (\d+)")
_CRASH = re.compile(r"\*\*\* (SIG[A-Z]+) received")
_RAYS_OWN = re.compile(r":(?:job_id|actor_name|task_name):|\[[^]]*\] [\w.]+:\d+: |Extension modules: |\s*@ |PC: @|\s*$")
_CRASHED = "Fatal Python error"  # the head of the stack of a crash in native code, its innermost frame first


def death_of(error: RayError, rank: int, processes: Processes) -> Death:
    """Return what is known of an actor's death.

    The process's own end is known on this node, from Linux 6.15 on; so is its log. Of another node there is what Ray
    says.

    Args:
        error: What Ray has raised for a call to it.
        rank: Its rank.
        processes: The processes of this node.
    """
    told, number = str(error), processes.number(rank)
    last_action, exit_ = processes.last_action(rank), processes.exit_of(rank)
    file, text = _log_of(told, number)
    crash = _CRASH.search(text)
    if exit_ is None and crash is not None:
        exit_ = Exit(None, crash[1])
    if exit_ is None and (code := _EXIT_CODE.search(told)) is not None:
        exit_ = Exit(int(code[1]), "")
    cause, is_short = _cause(error, told, exit_, processes.new_memory_kills())
    log = _shown(text)
    return Death(
        cause,
        None if exit_ is None else exit_.code,
        "" if exit_ is None else exit_.signal,
        is_short,
        last_action,
        log,
        str(file) if log else "",
        getattr(error, "preempted", False),
    )


def _cause(error: RayError, told: str, exit_: Exit | None, kills: int) -> tuple[str, bool]:
    """Say why an actor died, and whether its node was short of memory.

    Args:
        error: What Ray has raised.
        told: Its text.
        exit_: How the process ended; None if that is not known.
        kills: How many processes the kernel of this machine has ended meanwhile for want of memory.
    """
    if isinstance(error, OutOfMemoryError):
        used = _MEMORY.search(told)
        amount = f" ({used[1]} of {used[2]} were used)" if used else ""
        return f"ended by Ray's memory monitor, because its node was short of memory{amount}", True
    if getattr(error, "preempted", False):
        return "on a node that was taken away (preempted)", False
    if "terminated expectedly: received SIGTERM" in told:
        return "on a node whose Ray was ended by SIGTERM", False
    if "node has died" in told or "node was terminated" in told:
        return "on a node that died", False
    if "receives a SIGTERM" in told:
        return "ended by SIGTERM", False
    if "killed by `ray.kill`" in told:
        return "ended by ray.kill", False
    if "error raised in its creation task" in told:
        return f"ended by an exception when it was made: {told.strip().splitlines()[-1]}", False
    if not isinstance(error, RayActorError):
        return f"lost ({type(error).__name__}: {first_line(error)})", False
    if exit_ is None:
        return "", False
    if exit_.signal == "SIGKILL" and kills > 0:
        return "ended by SIGKILL, by the kernel, it seems, which has just ended a process for want of memory", True
    if exit_.signal:
        return f"ended by {exit_.signal}", False
    return f"ended with exit code {exit_.code}, by os._exit, sys.exit or a library", False


def _log_of(told: str, number: int | None) -> tuple[Path | None, str]:
    """Return the log of an actor of this node, and the end of its text; None and "" if there is none here.

    Args:
        told: What Ray says, which has the number of the process and its node's address.
        number: The number of the process, if it is known to be of this node.
    """
    pid, ip = _PID.search(told), _IP.search(told)
    if number is None and pid is not None and ip is not None and ip[1] == ray.util.get_node_ip_address():
        number = int(pid[1])
    folder = None if number is None else logs_folder()
    if folder is None:
        return None, ""
    for kind in ("err", "out"):
        with suppress(OSError):
            files = sorted(folder.glob(f"worker-*-{number}.{kind}"), key=lambda file: file.stat().st_mtime)
            text = _end_of(files[-1]) if files else ""
            if _shown(text):
                return files[-1], text
    return None, ""


def _end_of(file: Path) -> str:
    """Return the last ``_MOST`` bytes of a file as a text. Raises OSError."""
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - _MOST))
        return opened.read(_MOST).decode(errors="replace")


def _shown(text: str) -> tuple[str, ...]:
    """Return the last lines of a log that the program wrote; of a crash the first lines of its stack."""
    lines = [line[:_LONGEST] for line in text.splitlines() if not _RAYS_OWN.match(line)]
    crash = next((at for at, line in enumerate(lines) if line.startswith(_CRASHED)), None)
    return tuple(lines[-_LINES:] if crash is None else lines[crash : crash + _LINES])
