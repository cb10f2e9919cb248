"""Why an actor has died: from its process, from Ray's error, and from its log. No function waits for long."""

from __future__ import annotations

import re

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from raypar.cluster.deaths.process_monitor import Exit
from raypar.cluster.deaths.process_monitors import ProcessMonitors
from raypar.cluster.deaths.worker_logs import shown
from raypar.cluster.nodes.probes import ray_error_reason
from raypar.cluster.ray_private import dead_servers
from raypar.errors import Death

_PID = re.compile(r"\bpid: (\d+)")
_IP = re.compile(r"\bip: (\S+)")
_MEMORY = re.compile(r"was ([\d.]+ ?\wB) used / ([\d.]+ ?\wB) limit")
_THRESHOLD = re.compile(r"threshold of ([\d.]+\d)")
_EXIT_CODE = re.compile(r"exits with an exit code (\d+)")
_CRASH = re.compile(r"\*\*\* (SIG[A-Z]+) received")
_NODE_DIED = "node has died"


def death_of(error: RayError, rank: int, monitors: ProcessMonitors) -> Death:
    """Return the known facts of an actor's death.

    The end of its process is known since Linux 6.15.

    Args:
        error: Ray's error for a call to the actor.
        rank: The actor's rank.
        monitors: The monitors of the actors' processes.
    """
    text = str(error)
    seen = monitors.seen(rank, _NODE_DIED not in text, _number_here(text))
    exit_, crash = seen.exit, _CRASH.search(seen.log)
    if exit_ is None and crash is not None:
        exit_ = Exit(None, crash[1])
    if exit_ is None and (code := _EXIT_CODE.search(text)) is not None:
        exit_ = Exit(int(code[1]), "")
    cause, is_short = _cause(error, text, exit_, seen.memory_kills)
    if not cause and seen.is_silent:
        cause = "lost with its node, it seems, which does not answer"
    log = shown(seen.log)
    return Death(
        cause,
        None if exit_ is None else exit_.code,
        "" if exit_ is None else exit_.signal,
        is_short,
        seen.last_action,
        log,
        seen.log_file if log else "",
        getattr(error, "preempted", False),
    )


def _cause(error: RayError, text: str, exit_: Exit | None, kills: int) -> tuple[str, bool]:
    """Return why an actor died, and whether its node was short of memory.

    Args:
        error: Ray's error.
        text: The error's text.
        exit_: How the process ended; None if not known.
        kills: Number of processes that the kernel of its node has ended meanwhile for lack of memory.
    """
    if isinstance(error, OutOfMemoryError):
        used, most = _MEMORY.search(text), _THRESHOLD.search(text)
        limit = f", above the {_limit(most[1])} of RAY_memory_usage_threshold" if most else ""
        amount = f" ({used[1]} of {used[2]} were used{limit})" if used else ""
        return f"ended by Ray's memory monitor, because its node was short of memory{amount}", True
    if getattr(error, "preempted", False):
        return "on a node that was taken away (preempted)", False
    if "terminated expectedly: received SIGTERM" in text:
        return "on a node whose Ray was ended by SIGTERM", False
    if _NODE_DIED in text or "node was terminated" in text:
        return "on a node that died", False
    if "receives a SIGTERM" in text:
        return "ended by SIGTERM", False
    if "killed by `ray.kill`" in text:
        return "ended by ray.kill", False
    if "error raised in its creation task" in text:
        return f"ended by an exception in its constructor: {text.strip().splitlines()[-1]}", False
    if not isinstance(error, RayActorError):
        return f"lost ({ray_error_reason(error)})", False
    if "raylet" in dead_servers():
        return "lost with this node, whose Ray has lost its server, the raylet", False
    if exit_ is None:
        return "", False
    if exit_.signal == "SIGKILL" and kills > 0:
        return "ended by SIGKILL, by the kernel, it seems, which has just ended a process for lack of memory", True
    if exit_.signal:
        return f"ended by {exit_.signal}", False
    return f"ended with exit code {exit_.code}, by os._exit, sys.exit or a library", False


def _limit(threshold: str) -> str:
    """Return the limit of Ray's memory monitor in Ray's format: bytes, or a part of the memory."""
    return f"{float(threshold) / 2**30:.2f}GB" if float(threshold) > 1 else threshold


def _number_here(text: str) -> int | None:
    """Return the pid of a process in Ray's text, if it was certainly on this node; else None.

    Ray's text has the address of the node. Containers with the host's network share an address, so that the pid may be
    another process's here: then it is not used.
    """
    pid, ip = _PID.search(text), _IP.search(text)
    if pid is None or ip is None or ip[1] != ray.util.get_node_ip_address():
        return None
    return int(pid[1]) if [node["NodeManagerAddress"] for node in ray.nodes()].count(ip[1]) == 1 else None
