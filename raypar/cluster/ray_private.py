"""The private names of Ray that the driver uses.

No other file of raypar/ may name one (tests/test_house.py checks it); the actors have a separate file,
actors/collective/ray/ray_private.py.

Every function explains what it does and why Ray's public API does not suffice. Private names may change with every
release: **at each upgrade of Ray, retry the public API for every function of this file**. If a name is missing, raypar
logs a warning and works without it. The names are those of Ray 2.60.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from raypar.actors.machine.process_identity import own_identity
from raypar.actors.machine.system_features import has_feature

log = logging.getLogger(__name__)

# In the session folder: the pid of the driver that started this Ray, when it began, and its ``pid_domain``. Until Ray
# has started it is beside the session folder, whose name ends with the pid, and has the pid in its own name.
OWNER_FILE = "raypar-owner"
_LOOPBACK = "127.0.0.1"
_SOCKET = len("/session_2026-11-27_12-34-56_123456_1234567/sockets/plasma_store.12")  # of Ray, below its folder
_LONGEST_SOCKET = 103  # bytes of a socket's path: Linux takes 107, macOS 103
_FOR_RAY = "ray"  # a folder in this user's folder
_MOST_NAMES = 100  # most folder names to try, as other users may own some
_ANSWERS = 2  # seconds
_REMOVALS, _SETTLES = 5, 0.1  # tries to remove a session folder, and the seconds between two
_started_in = set[Path]()  # the folder of the Ray that this process has started, also if that was interrupted
_LATEST = "session_latest"  # Ray's link to the newest session folder
_NODE = "_private.worker._global_node"
_NO_NODE = "No node info found"  # Ray's error if this machine has no node
_DEATH = re.compile(
    "A worker died or was killed while executing a task|Raylet is terminated|has been marked dead because the detector"
)


def _found(path: str, lack: str = "") -> Any:
    """Return what Ray has under a dotted name below ``ray``; None if this Ray lacks it, or has None there.

    Args:
        path: The name.
        lack: The consequence, for a warning if it is lacking; "": no warning.
    """
    owner: Any = ray
    for name in path.split("."):
        owner = getattr(owner, name, None)
    if owner is None and lack:
        log.warning("this Ray has no %s: %s", path.rpartition(".")[2], lack)
    return owner


def start_on_loopback(**settings: Any) -> None:
    """Start Ray so that only this machine reaches its ports, and only this user its session folder.

    The public ``ray.init`` has no argument for the address to listen on, makes its folders readable by all, and fails
    if TMPDIR is too long for the paths of sockets, or without /dev/shm. Retry at upgrades.

    Args:
        **settings: The settings of ``ray.init``.
    """
    if not has_feature("shared_memory_folder"):
        settings["_plasma_directory"] = tempfile.gettempdir()
    folder, own = ray_folder(), own_identity()
    _started_in.add(folder)
    early = folder / f"{OWNER_FILE}-{own.pid}"
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        early.write_text(f"{own.pid} {own.began} {own.pid_domain}")
    with _loopback_kept():
        started: Any = ray.init(_node_ip_address=_LOOPBACK, _temp_dir=str(folder), **settings)
    with suppress(OSError):
        early.replace(Path(started.address_info["session_dir"]) / OWNER_FILE)


def disconnect(*, keeps_logs: bool = False) -> None:
    """Disconnect from Ray. A Ray that ``start_on_loopback`` has started ends, and its session folder is removed.

    The public ``ray.shutdown`` leaves the folder, of about 230 KB. Retry at upgrades.

    Args:
        keeps_logs: Whether the folder stays, as something has failed that its logs may explain.
    """
    session = None if (logs := logs_folder()) is None else logs.parent
    ray.shutdown()
    is_own = session is not None and session.parent in _started_in
    _started_in.clear()
    if session is None or not is_own or keeps_logs:
        return
    for _ in range(_REMOVALS):  # its last processes may still write there
        shutil.rmtree(session, ignore_errors=True)
        if not session.exists():
            break
        time.sleep(_SETTLES)
    with suppress(OSError):
        if (latest := session.parent / _LATEST).is_symlink() and not latest.exists():
            latest.unlink()


def silence_deaths() -> None:
    """Suppress Ray's message that a worker or node died, unless the user has set RAY_DEDUP_LOGS_SKIP_REGEX.

    Ray's text, with 20 lines of log for a node, would come before raypar's message, which names the actor and the
    cause. Ray reads the public variable when it is imported, which may be before raypar is. Retry at upgrades.
    """
    name, lack = "stdout_deduplicator", "it prints a text of its own when an actor or node dies"
    printed = _found(f"_private.ray_logging.{name}")  # Ray prints errors of the cluster to standard output
    if not hasattr(printed, "skip_re"):
        log.warning("this Ray has no %s: %s", name, lack)
    elif printed.skip_re is None:
        printed.skip_re = _DEATH


def ray_folder() -> Path:
    """Return the folder in which a local Ray creates its sessions' folders on this machine.

    It is in a folder that only this user can access (0700): ``raypar-<uid>`` in RAY_TMPDIR or TMPDIR, or in /tmp, with
    a warning, if the path of a socket there would be too long. Ray makes its folders writable by all, so that other
    users can rename files in /tmp/ray. If another user owns a folder of that name, a number is added to the name.

    Raises:
        OSError: It can't be created.
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
    """Return the ``number``-th name to try for this user's folder of Ray's sessions."""
    return f"raypar-{os.getuid()}" + (f"-{number}" if number else "")


def logs_folder() -> Path | None:
    """Return the folder of the logs of this node's workers; None if this Ray does not report it.

    It has a file with the last output of a dead actor. The public state API needs a dashboard. Retry at upgrades.
    """
    call = _found(f"{_NODE}.get_logs_dir_path")
    return None if call is None else Path(call())


def dead_servers() -> list[str]:
    """Return the names of the ended servers of a Ray that this process has started, such as "raylet".

    There is no public API for it. An actor whose raylet is gone dies without another cause. Retry at upgrades.
    """
    dead = _found(f"{_NODE}.dead_processes")
    return [] if dead is None else [kind for kind, _ in dead()]


def own_raylet() -> int | None:
    """Return the pid of the raylet of a Ray that this process has started; None if there is none.

    There is no public API for it. The raylet's agents are its child processes. Retry at upgrades.
    """
    raylets = (_found(f"{_NODE}.all_processes") or {}).get("raylet", [])
    return raylets[0].process.pid if raylets else None


def dashboard_address() -> str:
    """Return the address of the dashboard of the cluster to which this process is connected; "" if there is none.

    Of the public API only ``ray.init`` returns it. Retry at upgrades.
    """
    call = _found("_private.worker.get_dashboard_url")
    return str(call() or "") if call is not None else ""


@contextmanager
def _loopback_kept() -> Iterator[None]:
    """Make ``ray.init`` keep the address 127.0.0.1 during the context.

    Ray replaces it by an address that other machines reach, and then listens on all addresses: its metrics need no
    token.
    """
    services, lack = _found("_private.services"), "other machines may reach the ports of the Ray that raypar starts"
    original = _found("_private.services.resolve_ip_for_localhost", lack)
    if original is None:
        yield
        return
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = original


def free_resources() -> dict[str, dict[str, float]] | None:
    """Return the free resources of each node, by the node's id; None if this Ray does not report them.

    The public ``ray.available_resources`` adds up all nodes, and the state API needs a dashboard. Retry at upgrades.
    """
    call = _found("_private.state.available_resources_per_node", "actors are placed as if all nodes were free")
    return None if call is None else {str(node): dict(resources) for node, resources in call().items()}


def held_resources() -> dict[str, float]:
    """Return the resources that this process's task or actor holds, by Ray's names; none for a driver.

    The names include the number of a bundle and the id of its placement group, which the public
    ``get_assigned_resources`` omits. Retry at upgrades.
    """
    call = _found("_private.worker.global_worker.core_worker.resource_ids")
    held = {} if call is None else call()
    return {str(name): sum(amount for _, amount in parts) for name, parts in held.items()}


def coming_nodes() -> int | None:
    """Return the number of nodes that the cluster's autoscaler is adding; None without one, or if not reported.

    The only public API, ``ray status``, is a command for people. The first generation of the autoscaler writes a report
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
    """Return the nodes that Ray drains, by id, with their deadlines in seconds since the epoch; inf without one.

    Ray starts nothing on such a node any more. No public API reports it without a dashboard: ``ray.nodes`` reports the
    node as alive. Ray Train uses the same call. Retry at upgrades.
    """
    lack = "a node that is taken away is noticed when it is gone"
    call = _found("_private.state.state.get_draining_nodes", lack)
    draining = {} if call is None else call()
    return {str(node): deadline / 1e3 if deadline else math.inf for node, deadline in draining.items()}


def has_own_node(address: str, seconds: float) -> bool | None:
    """Return whether this machine has a node of a cluster, which a driver needs; None if this Ray can't check it.

    Ray looks for one for a minute when it connects, and has no public API to check before. Retry at upgrades.

    Args:
        address: The address of the cluster's head, with its port. It answers, and accepts the token of this process.
        seconds: Seconds to look, as a node may just be starting.
    """
    lack = "on a machine without a node it looks for one for a minute"
    look = _found("_private.services.get_node_to_connect_for_driver", lack)
    client = _found("_raylet.GcsClient", lack)
    if look is None or client is None:
        return None
    try:
        look(client(address=address), timeout_seconds=seconds)
    except (RuntimeError, RayError) as error:  # Ray reports other errors when it connects
        return False if _NO_NODE in str(error) else None
    return True


def own_token() -> str | None:
    """Return the token that Ray would send to a cluster, from its environment variables or ~/.ray/auth_token.

    It is "" if there is none, and None if this Ray does not report it. Ray has no public API to read it, only a command
    that prints it. Retry at upgrades.
    """
    loader = _found("_raylet.AuthenticationTokenLoader", "a cluster's token is not checked before connecting")
    return None if loader is None else str(loader.instance().get_raw_token(ignore_auth_mode=True) or "")
