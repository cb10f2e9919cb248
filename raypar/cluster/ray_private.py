"""The private names of Ray that the driver uses.

No other file of raypar/ may name one, and a test says so (tests/test_house.py); the actors have a file of their own,
actors/collective/ray_private.py.

Every function says what it does and why Ray's public way will not do. Private names may change with every release: **at
each upgrade of Ray, retry the public way for every function of this file**. A name that is gone is told as a warning,
and raypar does without it. The names are those of Ray 2.60.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from raypar.actors.process_identity import own_identity
from raypar.actors.system_features import has_feature

log = logging.getLogger(__name__)

# In the session folder: the pid of the driver that started this Ray, when it began, and its ``pid_domain``.
OWNER_FILE = "raypar-owner"
_LOOPBACK = "127.0.0.1"
_SOCKET = len("/session_2026-11-27_12-34-56_123456_1234567/sockets/plasma_store.12")  # of Ray, below its folder
_LONGEST_SOCKET = 103  # bytes of a socket's path: Linux takes 107, macOS 103
_FOR_RAY = "ray"  # below this user's folder
_MOST_NAMES = 100  # folders that others may have made under the names of ours
_RESOLVE = "resolve_ip_for_localhost"
_FREE = "available_resources_per_node"
_WORKER, _HELD = "global_worker", "resource_ids"
_ANSWERS = 2  # seconds
_DRAINING = "get_draining_nodes"
_DASHBOARD = "get_dashboard_url"
_NODE = "_global_node"
_OWN_NODE, _HEAD = "get_node_to_connect_for_driver", "GcsClient"
_NO_NODE = "No node info found"  # its error where it finds none
_LOADER = "AuthenticationTokenLoader"
_PRINTED = "stdout_deduplicator"  # Ray prints errors of the cluster to standard output
_DEATH = re.compile(
    "A worker died or was killed while executing a task|Raylet is terminated|has been marked dead because the detector"
)


def start_on_loopback(**settings: Any) -> None:
    """Start Ray so that nobody but this machine reaches its ports, and nobody but this user its session folder.

    The public ``ray.init`` takes no address to listen on, makes its folders open to all, and fails where TMPDIR is
    so long that a socket below it would have too long a path, and where there is no /dev/shm. Retry at upgrades.

    Args:
        **settings: The settings of ``ray.init``.
    """
    if not has_feature("shared_memory_folder"):
        settings["_plasma_directory"] = tempfile.gettempdir()
    folder = ray_folder()
    with _loopback_kept():
        started: Any = ray.init(_node_ip_address=_LOOPBACK, _temp_dir=str(folder), **settings)
    session = Path(started.address_info["session_dir"])
    with suppress(OSError):
        own = own_identity()
        (session / OWNER_FILE).write_text(f"{own.pid} {own.began} {own.pid_domain}")


def silence_deaths() -> None:
    """Let Ray not print that a worker or node died, unless the user's RAY_DEDUP_LOGS_SKIP_REGEX says what it skips.

    Ray's text, of a node with 20 lines of its log, would stand before raypar's sentence, which says which actor it was,
    and why. Ray reads the public variable when it is imported, which may be before raypar is. Retry at upgrades.
    """
    printed: Any = getattr(getattr(ray._private, "ray_logging", None), _PRINTED, None)
    if not hasattr(printed, "skip_re"):
        log.warning("this Ray has no %s: it prints a text of its own when an actor or node dies", _PRINTED)
    elif printed.skip_re is None:
        printed.skip_re = _DEATH


def ray_folder() -> Path:
    """Return the folder in which a local Ray makes its sessions' folders on this machine.

    It is in a folder that is this user's alone (0700), ``raypar-<uid>`` below RAY_TMPDIR or TMPDIR, or below /tmp where
    a socket below these had too long a path, which is said. Ray opens its own folders to all, so that in /tmp/ray
    others can rename what is there. Where somebody else has made that folder, a number follows its name.

    Raises:
        OSError: It can't be made.
    """
    variable = next((name for name in ("RAY_TMPDIR", "TMPDIR") if os.environ.get(name)), "")
    above = Path(os.environ[variable] if variable else "/tmp").absolute()
    most = _LONGEST_SOCKET - _SOCKET - len(f"/{_own_name(0)}/{_FOR_RAY}")
    if len(os.fsencode(above)) > most:
        log.warning("%s is too long for the paths of Ray's sockets: /tmp is taken; %d bytes would fit", variable, most)
        above = Path("/tmp")
    above.mkdir(parents=True, exist_ok=True)
    for number in range(_MOST_NAMES):
        folder = above / _own_name(number)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            folder.chmod(0o700)
            return folder / _FOR_RAY
    raise FileExistsError(errno.EEXIST, "somebody else has made the folders for Ray's sessions", str(above))


def _own_name(number: int) -> str:
    """Return the name of this user's folder for Ray's sessions; those after the first one are for where it is taken."""
    return f"raypar-{os.getuid()}" + (f"-{number}" if number else "")


def logs_folder() -> Path | None:
    """Return the folder in which Ray keeps the logs of this node's workers; None if this Ray does not tell it.

    What an actor wrote before it died is in a file there. The public state API needs a dashboard. Retry at upgrades.
    """
    node: Any = getattr(ray._private.worker, _NODE, None)
    tell: Any = getattr(node, "get_logs_dir_path", None)
    return None if tell is None else Path(tell())


def dead_servers() -> list[str]:
    """Return which servers have ended of a Ray that this process has started, as "raylet".

    Nothing public says it. An actor whose raylet is gone dies with no cause of its own. Retry at upgrades.
    """
    node: Any = getattr(ray._private.worker, _NODE, None)
    dead: Any = getattr(node, "dead_processes", None)
    return [] if dead is None else [kind for kind, _ in dead()]


def own_raylet() -> int | None:
    """Return the number of the raylet's process of a Ray that this process has started; None if there is none.

    Nothing public says it. Its agents are its children. Retry at upgrades.
    """
    node: Any = getattr(ray._private.worker, _NODE, None)
    raylets = getattr(node, "all_processes", {}).get("raylet", [])
    return raylets[0].process.pid if raylets else None


def dashboard_address() -> str:
    """Return the address of the dashboard of the cluster that this process is connected to; "" if there is none.

    ``ray.init`` returns it, and nothing else that is public does. Retry at upgrades.
    """
    tell: Any = getattr(ray._private.worker, _DASHBOARD, None)
    return str(tell() or "") if tell is not None else ""


@contextmanager
def _loopback_kept() -> Iterator[None]:
    """For the time of the context, let ``ray.init`` keep the address 127.0.0.1.

    Ray replaces it by one that other machines reach, and then listens on all addresses: its metrics need no token.
    """
    services: Any = getattr(ray._private, "services", None)
    original = getattr(services, _RESOLVE, None)
    if original is None:
        log.warning("this Ray has no %s: other machines may reach the ports of the Ray that raypar starts", _RESOLVE)
        yield
        return
    setattr(services, _RESOLVE, _unchanged)
    try:
        yield
    finally:
        setattr(services, _RESOLVE, original)


def _unchanged(host: str) -> str:
    return host


def free_resources() -> dict[str, dict[str, float]] | None:
    """Return what is free on each node, by the node's id; None if this Ray does not tell it.

    The public ``ray.available_resources`` adds up all nodes, and the state API needs a dashboard. Retry at upgrades.
    """
    tell: Any = getattr(getattr(ray._private, "state", None), _FREE, None)
    if tell is None:
        log.warning("this Ray has no %s: actors are placed as if all nodes were free", _FREE)
        return None
    return {str(node): dict(resources) for node, resources in tell().items()}


def held_resources() -> dict[str, float]:
    """Return what this process's task or actor has taken of its node, by Ray's names; nothing for a driver.

    The names are those with the number of a bundle and the id of its placement group, which the public
    ``get_assigned_resources`` leaves out. Retry at upgrades.
    """
    worker: Any = getattr(ray._private.worker, _WORKER, None)
    tell: Any = getattr(getattr(worker, "core_worker", None), _HELD, None)
    if tell is None:
        return {}
    return {str(name): sum(amount for _, amount in parts) for name, parts in tell().items()}


def coming_nodes() -> int | None:
    """Return how many nodes the cluster's autoscaler is adding; None if there is none, or this Ray does not tell it.

    The one public call, ``ray status``, is a command for people. The first generation of the autoscaler writes a report
    into Ray's store, the second one answers a call. Retry at upgrades.
    """
    with suppress(Exception):  # of another generation: Ray raises many types
        from ray._private import ray_constants
        from ray.experimental import internal_kv

        raw = internal_kv._internal_kv_get(ray_constants.DEBUG_AUTOSCALING_STATUS)
        if raw is not None:
            report = json.loads(raw)["autoscaler_report"]
            return int(len(report["pending_nodes"]) + sum(report["pending_launches"].values()))
        from ray.autoscaler.v2.sdk import get_cluster_status

        status = get_cluster_status(str(ray.get_runtime_context().gcs_address), timeout=_ANSWERS)
        if status.stats.autoscaler_version is not None or status.pending_nodes or status.pending_launches:
            return len(status.pending_nodes) + sum(launch.count for launch in status.pending_launches)
    return None


def draining_nodes() -> dict[str, float]:
    """Return the nodes that Ray drains, by id, and when each is gone: seconds since the epoch; inf if that is not told.

    Ray starts nothing on such a node any more. No public call tells it without a dashboard: ``ray.nodes`` says that the
    node is alive. Ray Train asks the same. Retry at upgrades.
    """
    tell: Any = getattr(getattr(getattr(ray._private, "state", None), "state", None), _DRAINING, None)
    if tell is None:
        log.warning("this Ray has no %s: a node that is taken away is noticed when it is gone", _DRAINING)
        return {}
    return {str(node): deadline / 1e3 if deadline else math.inf for node, deadline in tell().items()}


def has_own_node(address: str, seconds: float) -> bool | None:
    """Return whether this machine has a node of a cluster, on which a driver can be; None if this Ray does not tell it.

    Ray looks for one as soon as it connects, for a minute, and has no public way to ask. Retry at upgrades.

    Args:
        address: The address of the cluster's head, with its port. It answers, and takes the token of this process.
        seconds: How long to look: a node that starts is one soon.
    """
    look: Any = getattr(getattr(ray._private, "services", None), _OWN_NODE, None)
    client: Any = getattr(ray._raylet, _HEAD, None)
    if look is None or client is None:
        log.warning("this Ray has no %s: on a machine without a node it looks for one for a minute", _OWN_NODE)
        return None
    try:
        look(client(address=address), timeout_seconds=seconds)
    except (RuntimeError, RayError) as error:  # what else is wrong, Ray tells when it connects
        return False if _NO_NODE in str(error) else None
    return True


def own_token() -> str | None:
    """Return the token that Ray would send to a cluster, from its environment variables or ~/.ray/auth_token.

    It is "" if there is none, and None if this Ray does not tell it. Ray has no public way to read it, only a command
    that prints it. Retry at upgrades.
    """
    loader: Any = getattr(ray._raylet, _LOADER, None)
    if loader is None:
        log.warning("this Ray has no %s: a cluster's token is not checked before connecting", _LOADER)
        return None
    return str(loader.instance().get_raw_token(ignore_auth_mode=True) or "")
