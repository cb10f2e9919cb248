"""Ray clusters: connect to one or start one, place a job's actors on it, and end them."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import ray
import torch
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypar.actors.errors import first_line
from raypar.actors.host_cores import num_cores
from raypar.actors.mesh.world import World
from raypar.actors.specs.types import DeviceChoice
from raypar.cluster.actors import Actors, driver_id
from raypar.cluster.address import demand_answer, demand_driver, unanswered
from raypar.cluster.devices import Share, demand_build, gpu_share
from raypar.cluster.given_group import bundles_of_group, captured, chosen_bundles, free_bundles, too_small
from raypar.cluster.interrupts import Sigterm, patience
from raypar.cluster.nodes import demand_alike, living_nodes
from raypar.cluster.placement import Node, bundles_of, place, room_told, split_told, told, wants
from raypar.cluster.ray_private import silence_deaths, start_on_loopback
from raypar.cluster.together import together
from raypar.cluster.vacancies import Home
from raypar.errors import ConfigError, JobError, RoomError
from raypar.planner.host import num_slots, room_faults, starts_own_ray
from raypar.schedules.float_sum import float_sum

T = TypeVar("T")

log = logging.getLogger(__name__)

_PATIENCE = "RAY_gcs_server_port_wait_time_s"
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # of actors that failed with another one, which is told already
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # with Ray's default of 15 every other process of the machine goes first
    # Less idle work: by default Ray's log monitor looks for new files ten times a second, to send their lines to a
    # driver that does not want them, and an agent collects figures of all processes every 5 s for a dashboard.
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "LOG_NAME_UPDATE_INTERVAL_S": "30",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    _PATIENCE: "90",  # seconds in which Ray's server has to start, 30 unless it is set
}
ROOM_SECONDS = 60.0  # that a launch waits for resources that others have
_SAY = 10.0  # seconds between two lines of what is waited for
_NODE_ID = "ray.io/node-id"  # the label that Ray gives each node
_CPU = Share("cpu", 0.0)
_TOO_SMALL = "use a smaller mesh or a larger cluster, or wait_for_nodes (--wait-for-nodes SECONDS) if nodes are to come"
_MOST_HOLDERS = 4  # placement groups that are named
_SETTLES = 5.0  # seconds after which Ray's view of what is free has a placement group that was just made
_LOOK = 0.5  # seconds between two checks of the placement group
_SHARING = f", which share the {num_cores()} cores of this machine"


class Waits(NamedTuple):
    """How many seconds a launch waits.

    Attributes:
        nodes: For nodes that an autoscaler adds or that come back, if there are too few.
        room: For resources that others have.
    """

    nodes: float = 0.0
    room: float = ROOM_SECONDS


USUAL_WAITS = Waits()


def start_actors(
    hosted: type,
    world: World,
    device: DeviceChoice,
    job: str,
    waits: Waits = USUAL_WAITS,
    spares: int = 0,
    folder: Path | None = None,
    group: PlacementGroup | None = None,
) -> Actors:
    """Start one actor for each rank of the world, all of them or none, and return them.

    Uses the Ray that this process is connected to, else the cluster at RAY_ADDRESS, else starts Ray on this machine.
    Each actor gets one CPU and the GPUs of ``gpu_share``.

    Args:
        hosted: The class of the actors.
        world: The ranks.
        device: The run's setting: "auto", "cpu" or "cuda".
        job: The job's name, which begins the actors' names.
        waits: How long to wait for nodes and for room.
        spares: Number of further actors, which take the places of those that fail.
        folder: The run's folder, which all nodes with actors must see; None without one.
        group: The placement group in which they are to be; None for that of this task, if it has room, or a new one.

    Raises:
        ConfigError: If there is no GPU where one is demanded, or a node that lacks what the run needs.
        RoomError: If there is no room.
        JobError: If Ray does not start.
    """
    built = torch.backends.cuda.is_built()  # the actors' torch is the same build
    demand_build(device, built=built)
    if not ray.is_initialized() and (faults := list(room_faults(world.size + spares))):
        raise ConfigError(faults)
    with _own_sigterm():
        owns = _connect()
    try:
        nodes = _roomy(world, world.size + spares, grows=waits.nodes > 0)
        share = gpu_share(device, world.size + spares, _num_gpus(nodes, group), built=built, grows=waits.nodes > 0)
        claim = _inside(group or captured(), world, nodes, share, spares, waits.room if group else None)
        claim = claim or _claim(world, nodes, share, grows=waits.nodes > 0).with_spares(spares, share)
        with patience("their placement") as ctrl_c:  # a claim that nobody knows would stay pending
            made = claim.made(job)
            crowds = owns and starts_own_ray() and world.size > num_cores()
            log.info("starting %d actors%s", world.size + spares, _SHARING if crowds else "")
        try:
            ctrl_c.heed()
            demand_alike(claim.nodes, folder)
            _await(made, world, share, max(waits))
            create, homes = partial(_actor, _remote(hosted, share)), claim.homes(made)
            handles = together(lambda its: create(*its), zip(claim.names(world, job), homes, strict=True))
        except BaseException:
            claim.give_back(made)
            raise
    except BaseException:
        if owns:
            ray.shutdown()
        raise
    claims = partial(_elsewhere, share)
    return Actors(handles, claim.own(made), owns, driver_id(), share.device, create, claims, homes, waits.nodes)


def _num_gpus(nodes: Sequence[Node], group: PlacementGroup | None) -> int:
    """Return the number of GPUs of a placement group, or of all nodes."""
    totals = [node.total for node in nodes] if group is None else bundles_of_group(group).values()
    return int(float_sum(total.get("GPU", 0.0) for total in totals))


def _roomy(world: World, actors: int, *, grows: bool) -> list[Node]:
    """Return the living nodes. Raises RoomError if they have too few CPUs, and no other nodes are to come."""
    nodes = living_nodes()
    if not grows and float_sum(node.total.get("CPU", 0.0) for node in nodes) < actors:
        raise RoomError([_no_room(world, nodes, _TOO_SMALL, _CPU)])
    return nodes


def _await(group: PlacementGroup, world: World, share: Share, seconds: float) -> None:
    """Wait until a placement group has its resources, and say every 10 s for what. Raises RoomError after so many."""
    begin = said = time.monotonic()
    while not group.wait(_LOOK):  # in short waits: Ray ignores Ctrl-C while waiting
        if time.monotonic() - begin > seconds:
            why = f"they were not free within {seconds:g} s; wait_for_room (--wait-for-room SECONDS) waits longer"
            raise RoomError([f"{_no_room(world, living_nodes(), why, share)}{_holders(group)}"])
        if time.monotonic() - said > _SAY:
            said = time.monotonic()
            left = f"waited for, {seconds - (said - begin):.0f} s are left"
            log.info("%s%s", _no_room(world, living_nodes(), left, share), _holders(group))


def _holders(own: PlacementGroup) -> str:
    """Say which placement groups hold CPUs, those with most first; "" if none does."""
    claims = (claim for claim in placement_group_table().values() if claim["state"] == "CREATED")
    held = Counter[str]()
    for claim in claims:
        if claim["placement_group_id"] != own.id.hex():
            held[claim["name"] or "a group without a name"] += round(
                float_sum(bundle.get("CPU", 0.0) for bundle in claim["bundles"].values())
            )
    most = ", ".join(f"{name} {cpus}" for name, cpus in held.most_common(_MOST_HOLDERS) if cpus)
    return f"; of the CPUs hold {most}" if most else ""


@contextmanager
def connected() -> Iterator[list[Node]]:
    """Connect to the cluster at RAY_ADDRESS, if this process is not connected, for the time of the context.

    Yields:
        Its nodes.

    Raises:
        ConfigError: No cluster answers there, or it refuses this process.
        JobError: There is no RAY_ADDRESS, and Ray does not start on this machine.
    """
    with _own_sigterm():
        owns = _connect()
    try:
        yield living_nodes()
    finally:
        if owns:
            ray.shutdown()


def foreseen(world: World, nodes: Sequence[Node], device: DeviceChoice) -> list[str]:
    """Say in lines which actor would go on which node, and what is wrong with that.

    Args:
        world: The ranks.
        nodes: The nodes of the cluster that this process is connected to.
        device: The run's setting.

    Raises:
        ConfigError: A GPU is demanded, and there can be none.
    """
    gpus = int(float_sum(node.total.get("GPU", 0.0) for node in nodes))
    share = gpu_share(device, world.size, gpus, built=torch.backends.cuda.is_built(), grows=False)
    found = place(world, nodes, share, free=False)
    if found.missing:
        return [_no_room(world, nodes, _TOO_SMALL, share)]
    now = place(world, nodes, share)
    waits = now.is_worse_than(found)
    lines = list(told(world, found if waits else now, nodes))
    if waits:
        lines.append(_no_room(world, nodes, "it would wait until all are free, and Ray would choose", share))
    if found.split:
        lines.append(split_told(world, found, share))
    return lines


def _in_lasting_thread(call: Callable[..., object], **settings: object) -> None:
    """Make a call in a thread that lives as long as the process, unless this is the main thread.

    The servers that Ray starts end with the thread that started them.
    """
    if threading.current_thread() is threading.main_thread():
        call(**settings)
        return
    made = Future[object]()

    def lasting() -> None:
        try:
            made.set_result(call(**settings))
        except BaseException as error:
            made.set_exception(error)
        threading.Event().wait()

    threading.Thread(target=lasting, name="raypar's Ray", daemon=True).start()
    made.result()


@dataclass(frozen=True)
class _Claim:
    """A placement group that is to be made.

    Attributes:
        bundles: Its bundles.
        bundle: The bundle of each rank.
        pins: The node on which each bundle must be; empty if Ray is to choose.
        nodes: The nodes that may get actors.
        spares: The bundles of spare actors, on any node.
        given: The placement group of others that is used in place of a new one; None for a new one.
    """

    bundles: list[dict[str, float]]
    bundle: Sequence[int]
    pins: list[Node]
    nodes: list[Node]
    spares: Sequence[int] = ()
    given: PlacementGroup | None = None

    def with_spares(self, count: int, share: Share) -> _Claim:
        """Return the claim with a bundle for each of so many spare actors besides."""
        first = len(self.bundles)
        return replace(self, bundles=[*self.bundles, *[wants(share)] * count], spares=range(first, first + count))

    def homes(self, group: PlacementGroup) -> list[Home]:
        """Return the home of each rank in the placement group that was made, and then those of spare actors."""
        pinned = [Home(group, bundle, self.pins[bundle].id if self.pins else "") for bundle in self.bundle]
        return [*pinned, *(Home(group, bundle) for bundle in self.spares)]

    def names(self, world: World, job: str) -> list[str]:
        """Return the name of each rank's actor, and then those of spare actors."""
        spares = range(world.size, world.size + len(self.spares))
        names = [*map(world.label, range(world.size)), *(f"spare {number}" for number in spares)]
        return [f"{job} {name}" for name in names]

    def made(self, job: str) -> PlacementGroup:
        """Claim it of Ray, unless it is given."""
        if self.given is not None:
            return self.given
        pins: list[dict[str, str]] = [{_NODE_ID: node.id} for node in self.pins]
        if pins:
            pins += [{}] * len(self.spares)
        claim: Any = placement_group  # its type annotations lack None
        made: PlacementGroup = claim(self.bundles, strategy="PACK", name=job, bundle_label_selector=pins or None)
        return made

    def own(self, made: PlacementGroup) -> PlacementGroup | None:
        """Return the placement group that was made, if it was not given."""
        return None if self.given else made

    def give_back(self, made: PlacementGroup) -> None:
        """Remove the placement group that was made; not one that was given."""
        if self.given is None:
            remove_placement_group(made)


def _inside(
    group: PlacementGroup | None, world: World, nodes: Sequence[Node], share: Share, spares: int, seconds: float | None
) -> _Claim | None:
    """Place the actors in a placement group of others; None if there is none, or this task's has no room for them.

    Args:
        group: The group; None if none is given, and this process is no task of one.
        world: The ranks.
        nodes: The living nodes.
        share: The resources of an actor.
        spares: Number of spare actors.
        seconds: How long to wait until its bundles are free; None if it was not asked for.

    Raises:
        ConfigError: It was removed, or is none of this cluster.
        RoomError: It has no room, or had none in time.
    """
    if group is None:
        return None
    bundles, begin, actors = bundles_of_group(group), time.monotonic(), world.size + spares
    fits = len(chosen_bundles(bundles, share, actors)) == actors
    while len(chosen := chosen_bundles(free := free_bundles(group, bundles), share, actors)) < actors:
        if fits and time.monotonic() - begin < (_SETTLES if seconds is None else max(seconds, _SETTLES)):
            time.sleep(_LOOK)
        elif seconds is None:
            log.info("the placement group of this task has no room for %d actors: they get one of their own", actors)
            return None
        else:
            raise RoomError([too_small(group, bundles, free if fits else bundles, share, actors)])
    return _Claim([], chosen[: world.size], [], list(nodes), chosen[world.size :], group)


def _claim(world: World, nodes: Sequence[Node], share: Share, *, grows: bool) -> _Claim:
    """Place the actors on the nodes, and log where.

    Where all nodes together have room that is not free yet, as far as tensor groups are to be whole, or nodes are to
    come, Ray chooses when there is.

    Raises:
        RoomError: There is no room on the nodes even if all were free, and none are to come.
    """
    whole, now = place(world, nodes, share, free=False), place(world, nodes, share)
    if whole.missing and not grows:
        raise RoomError([_no_room(world, nodes, _TOO_SMALL, share)])
    if now.is_worse_than(whole):
        bundles, bundle = bundles_of(world, share, whole=not whole.split)
        return _Claim(bundles, bundle, [], list(nodes))
    if now.split:
        log.warning("%s", split_told(world, now, share))
    pins = [node for node in now.nodes if node is not None]
    pinned = {node.id for node in pins}
    used = [node for node in nodes if node.id in pinned]
    if len(used) > 1:
        log.info("actors on %d nodes: %s", len(used), "; ".join(told(world, now, used)))
    return _Claim([wants(share)] * world.size, range(world.size), pins, used)


def _remote(cls: type, share: Share) -> Any:
    """Return the class of the actors as Ray has it; made once, because each one that is made is pickled and sent."""
    decorate: Any = ray.remote  # its type annotations lack concurrency groups
    # No retries: a retried backward would add its gradients twice. The driver does the recovery.
    kept = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {"ctl": 2, "disk": 1}}
    return decorate(num_cpus=1, num_gpus=share.gpus, **kept)(cls)


def _actor(remote: Any, name: str, home: Home) -> Any:
    """Create an actor in its home."""
    where = PlacementGroupSchedulingStrategy(home.group, home.bundle)
    return remote.options(name=name, scheduling_strategy=where).remote()


def _elsewhere(share: Share, name: str) -> PlacementGroup:
    """Claim a home for one more actor on any node, without waiting for it."""
    group: PlacementGroup = placement_group([wants(share)], strategy="PACK", name=name)
    return group


def free_told() -> str:
    """Say how many CPUs are free on each node."""
    return "; ".join(f"{node.name} has {node.free.get('CPU', 0.0):g} free CPUs" for node in living_nodes())


def _connect() -> bool:
    """Connect to Ray if this process is not connected; return whether the connection is ours to close."""
    demand_driver()
    silence_deaths()
    if ray.is_initialized():
        return False
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    address = os.environ.get("RAY_ADDRESS")
    if address:
        try:
            demand_answer(address)
            ray.init(address=address, namespace="raypar", log_to_driver=False, logging_level=logging.ERROR)
        except ConfigError:
            raise
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError([unanswered(address, error)]) from error
        return True
    old = os.umask(0o077)  # Ray writes its token file with the umask of the process
    try:
        _in_lasting_thread(
            start_on_loopback,
            address="local",
            num_cpus=num_slots(),
            namespace="raypar",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=256 * 2**20,  # bytes: small, because tensors never go through it
        )
    except Exception as error:  # Ray raises many types, Exception itself among them
        ray.shutdown()
        raise JobError(
            f"Ray does not start on this machine ({first_line(error)}): try again if the machine is busy "
            f"(load {os.getloadavg()[0]:.0f} on {num_cores()} cores), with {_PATIENCE}=300 for more than "
            f"{os.environ[_PATIENCE]} s; else see that /tmp (or RAY_TMPDIR) has room, and that no broken Ray of yours "
            "is left running"
        ) from error
    except BaseException:  # Ctrl-C: parts of Ray are running already
        ray.shutdown()
        raise
    finally:
        os.umask(old)
    return True


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the previous SIGTERM handler; where there is none, unwind the stack, at first between two steps.

    So a job saves its run and ends. Ray's own, lower-level handler aborts the process after 3 s, in the middle of that.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        handler = Sigterm() if before is signal.SIG_DFL else before
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def shipped(parts: T) -> T:
    """Return copies of objects as an actor gets them, with all that their functions close over.

    Args:
        parts: The objects, in a tuple.

    Raises:
        ConfigError: They can't be pickled for the actors; a function that closes over a lock can't.
    """
    try:
        copies: T = ray.cloudpickle.loads(ray.cloudpickle.dumps(parts))
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(
            [f"model or data can't be sent to actors ({reason}): make such things inside the function"]
        ) from None
    return copies


def _no_room(world: World, nodes: Sequence[Node], why: str, share: Share) -> str:
    """Describe what the world needs and what each node of the cluster has."""
    wanted = wants(share)
    need = " and ".join(f"{world.size * amount:g} {name}s" for name, amount in wanted.items())
    have = []
    for name in wanted:
        total, free = (
            float_sum(node.total.get(name, 0.0) for node in nodes),
            float_sum(node.free.get(name, 0.0) for node in nodes),
        )
        have.append(f"{total:g}{f' {name}s' if share.gpus else ''} ({free:g} free)")
    others = f" ({len(world.server_ranks)} of them servers)" if world.servers else ""
    if world.mesh.expert_actors:
        others = f" ({world.mesh.actors - world.mesh.size} of them for experts)"
    each = f" ({room_told(nodes, share)})" if len(nodes) > 1 else ""
    return (
        f"mesh: {world.size} actors{others} need {need}, the cluster has {' and '.join(have)} "
        f"on {len(nodes)} node{'s' if len(nodes) != 1 else ''}{each}: {why}"
    )
