"""Ray clusters: connect to one or start one, place a job's actors on it, and end them."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import ray
import torch
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypar.actors.errors import first_line
from raypar.actors.machine.host_cores import num_cores
from raypar.actors.machine.this_machine import actor_count_faults, num_slots, starts_own_ray
from raypar.actors.mesh.world import World
from raypar.actors.specs.resources import PlacementStrategy, Resources
from raypar.actors.specs.types import DeviceChoice, SharedGpu
from raypar.cluster.address import demand_answer, demand_driver, unanswered
from raypar.cluster.interrupts import Sigterm
from raypar.cluster.lifecycle.actors import Actors, driver_id
from raypar.cluster.lifecycle.claims import Claim, actor_name, claimed
from raypar.cluster.lifecycle.replacement_actors import ActorBundle
from raypar.cluster.nodes.nodes import demand_alike, demand_fp8_accelerators, living_nodes
from raypar.cluster.placement.devices import ActorResources, demand_build, share_of
from raypar.cluster.placement.given_group import (
    bundles_of_group,
    chosen_bundles,
    demand_one_node,
    free_bundles,
    too_small,
)
from raypar.cluster.placement.placement import Node, blocks_of, place, placement_lines, split_message
from raypar.cluster.placement.shortage import TOO_SMALL, no_room, one_node_faults
from raypar.cluster.ray_private import disconnect, silence_deaths, start_on_loopback
from raypar.cluster.together import together
from raypar.errors import ConfigError, JobError, RoomError
from raypar.log_details import DETAIL
from raypar.schedules.float_sum import float_sum

T = TypeVar("T")

log = logging.getLogger(__name__)

_PATIENCE = "RAY_gcs_server_port_wait_time_s"
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # of actors that failed because of another one, whose error is reported
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray's default of 15 gives every other process of the machine priority
    # Less idle work: by default Ray's log monitor looks for new files ten times a second, to send their lines to the
    # driver, which ignores them, and an agent collects figures of all processes every 5 s for a dashboard.
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "LOG_NAME_UPDATE_INTERVAL_S": "30",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    _PATIENCE: "90",  # seconds within which Ray's server has to start; Ray's default is 30
}
ROOM_SECONDS = 60.0  # for which a launch waits for resources that other jobs hold
_USUAL_RESOURCES = Resources()
_STRATEGIES: Mapping[str, str] = {
    "STRICT_PACK": "STRICT_PACK wants one node with room for all: use a smaller mesh, or another placement_strategy",
    "STRICT_SPREAD": "STRICT_SPREAD wants a node for each: use a smaller mesh, or another placement_strategy",
}
_SETTLES = 5.0  # seconds until Ray's view of free resources includes a new placement group
_LOOK = 0.5  # seconds between two checks of the placement group
_SHARING = f", which share the {num_cores()} cores of this machine"


class Waits(NamedTuple):
    """The seconds for which a launch waits.

    Attributes:
        nodes: For nodes that an autoscaler adds or that come back, if there are too few.
        room: For resources that other jobs hold.
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
    resources: Resources = _USUAL_RESOURCES,
    shared_gpu: SharedGpu = "staged",
    unfit: Collection[str] = (),
) -> Actors:
    """Start one actor for each rank of the world, all of them or none, and return them.

    Uses the Ray to which this process is connected, else the cluster at RAY_ADDRESS, else starts Ray on this machine.

    Args:
        hosted: The class of the actors.
        world: The ranks.
        device: The run's setting: "auto", "cpu" or "cuda".
        job: The job's name, which begins the actors' names.
        waits: Seconds to wait for nodes and for room.
        spares: Number of further actors, which replace those that fail.
        folder: The run's folder, which all nodes with actors must see; None without one.
        group: The placement group of the actors; None for that of this task, if it has room, or new ones.
        resources: The resources of each actor besides the GPUs of ``gpu_share``.
        shared_gpu: How actors of one GPU exchange tensors; over NCCL they are all on one node.
        unfit: The kinds of accelerators that do not multiply fp8, if the run does, by Ray's names.

    Raises:
        ConfigError: If a demanded GPU is missing, or a node lacks what the run needs.
        RoomError: If there is no room.
        JobError: If Ray does not start.
    """
    built, count = torch.backends.cuda.is_built(), world.size + spares  # the actors' torch is the same build
    _announce(world, device, count, resources.cpus, built=built)
    with ExitStack() as undo:
        owns = _connect_within(undo)
        grows = waits.nodes > 0
        nodes = _roomy(world, count, resources.cpus, grows=grows)
        gpus = _num_gpus(nodes, group)
        share = share_of(device, resources, count, gpus, built=built, grows=grows, shared_gpu=shared_gpu)
        within, seconds = group or get_current_placement_group(), waits.room if group else None
        bundles, claim = _inside(within, share, count, seconds, on_one_node=shared_gpu == "nccl"), None
        if not bundles:
            strategy = _strategy(world, nodes, share, resources.placement_strategy, shared_gpu)
            claim, nodes = _claim(world, nodes, share, strategy, spares, job, grows=grows)
            undo.callback(claim.give_back)
            claim.make()
        demand_fp8_accelerators(nodes, unfit if share.device == "cuda" else ())
        demand_alike(nodes, folder)
        if claim is not None:
            claim.wait(max(waits))
            bundles = claim.bundles()
        create = partial(_actor, _remote(hosted, share))
        names = [f"{job} {actor_name(world, number)}" for number in range(count)]
        handles = together(lambda pair: create(*pair), zip(names, bundles, strict=True))
        undo.pop_all()
    return Actors(handles, owns, driver_id(), share.device, create, partial(claimed, share=share), bundles, waits.nodes)


def _connect_within(undo: ExitStack) -> bool:
    """Connect to Ray, and disconnect if an exception leaves the context; return what ``_connect`` does."""
    with _own_sigterm():
        owns = _connect()
    if owns:
        undo.push(_disconnect)
    return owns


def _announce(world: World, device: DeviceChoice, actors: int, cpus: float, *, built: bool) -> None:
    """Log that actors start. Raises ConfigError if their torch lacks CUDA, or a Ray of our own CPUs for them."""
    demand_build(device, built=built)
    if not ray.is_initialized() and (faults := list(actor_count_faults(actors, cpus))):
        raise ConfigError(faults)
    crowds = not ray.is_initialized() and starts_own_ray() and world.size > num_cores()
    log.info("starting %d actor%s%s", actors, "s" * (actors != 1), _SHARING if crowds else "", extra=DETAIL)


def _num_gpus(nodes: Sequence[Node], group: PlacementGroup | None) -> int:
    """Return the number of GPUs of a placement group, or of all nodes."""
    totals = [node.total for node in nodes] if group is None else bundles_of_group(group).values()
    return int(float_sum(total.get("GPU", 0.0) for total in totals))


def _roomy(world: World, actors: int, cpus: float, *, grows: bool) -> list[Node]:
    """Return the living nodes. Raises RoomError if they have too few CPUs, and the cluster adds no nodes."""
    nodes = living_nodes()
    if not grows and float_sum(node.total.get("CPU", 0.0) for node in nodes) < actors * cpus:
        raise RoomError([no_room(world, nodes, TOO_SMALL, ActorResources("cpu", 0.0, cpus))])
    return nodes


@contextmanager
def connected() -> Iterator[list[Node]]:
    """Connect to the cluster at RAY_ADDRESS for the time of the context, unless this process is connected already.

    Yields:
        The cluster's nodes.

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
            disconnect()


def _strategy(
    world: World, nodes: Sequence[Node], share: ActorResources, strategy: PlacementStrategy, shared_gpu: SharedGpu
) -> PlacementStrategy:
    """Return where actors go: all on one node if they share GPUs over NCCL. Raises ConfigError if none has room."""
    if shared_gpu == "staged":
        return strategy
    ConfigError.raise_if(one_node_faults(world, nodes, share))
    return "STRICT_PACK"


def foreseen(
    world: World,
    nodes: Sequence[Node],
    device: DeviceChoice,
    resources: Resources,
    shared_gpu: SharedGpu = "staged",
) -> list[str]:
    """Return lines with the node of each actor of a future launch, and the faults of that placement.

    Args:
        world: The ranks.
        nodes: The nodes of the cluster to which this process is connected.
        device: The run's setting.
        resources: The run's resources.
        shared_gpu: How actors of one GPU exchange tensors.

    Raises:
        ConfigError: The run demands a GPU, and there can be none, or shares GPUs over NCCL, and can't.
    """
    gpus = int(float_sum(node.total.get("GPU", 0.0) for node in nodes))
    built = torch.backends.cuda.is_built()
    share = share_of(device, resources, world.size, gpus, built=built, grows=False, shared_gpu=shared_gpu)
    strategy = _strategy(world, nodes, share, resources.placement_strategy, shared_gpu)
    found = place(world, nodes, share, strategy, free=False)
    if found.missing:
        return [no_room(world, nodes, TOO_SMALL, share)]
    now = place(world, nodes, share, strategy)
    waits = now.is_worse_than(found)
    lines = list(placement_lines(world, found if waits else now, nodes))
    if waits:
        lines.append(no_room(world, nodes, "it would wait until all are free, and Ray would choose", share))
    if found.split:
        lines.append(split_message(world, found, share))
    return lines


def _disconnect(kind: type[BaseException] | None, *_: object) -> None:
    """Disconnect from Ray because of an exception of this kind; its logs stay if they may explain it."""
    disconnect(keeps_logs=kind is not None and issubclass(kind, Exception) and not issubclass(kind, ConfigError))


def _in_lasting_thread(call: Callable[..., object], **settings: object) -> None:
    """Call a function in a thread that lives as long as the process, unless this is the main thread.

    The servers that Ray starts end with the thread that started them.
    """
    if threading.current_thread() is threading.main_thread():
        call(**settings)
        return
    outcome = Future[object]()

    def lasting() -> None:
        try:
            outcome.set_result(call(**settings))
        except BaseException as error:
            outcome.set_exception(error)
        threading.Event().wait()

    threading.Thread(target=lasting, name="raypar's Ray", daemon=True).start()
    outcome.result()


def _inside(
    group: PlacementGroup | None, share: ActorResources, actors: int, seconds: float | None, *, on_one_node: bool
) -> list[ActorBundle]:
    """Return bundles for actors in an existing placement group; [] without a group, or if this task's has no room.

    Args:
        group: The group; None if the user gave none, and this process is no task in one.
        share: The resources of an actor.
        actors: Number of actors.
        seconds: Seconds to wait until its bundles are free; None if it is this task's and not the user's choice.
        on_one_node: Whether all actors must be on one node.

    Raises:
        ConfigError: It was removed, or belongs to another cluster, or its bundles are on several nodes.
        RoomError: It has no room, or had none in time.
    """
    if group is None:
        return []
    bundles, begin = bundles_of_group(group), time.monotonic()
    fits = len(chosen_bundles(bundles, share, actors)) == actors
    while len(chosen := chosen_bundles(free := free_bundles(group, bundles), share, actors)) < actors:
        if fits and time.monotonic() - begin < (_SETTLES if seconds is None else max(seconds, _SETTLES)):
            time.sleep(_LOOK)
        elif seconds is None:
            few = too_small(group, bundles, free, share, actors)
            log.warning("%s: they go outside of it; give it a bundle for each, beside that of this task", few)
            return []
        else:
            few = too_small(group, bundles, free if fits else bundles, share, actors)
            raise RoomError([f"{few}: make it larger, use a smaller mesh, or leave placement_group out"])
    if on_one_node:
        demand_one_node(group, chosen)
    return [ActorBundle(group, bundle) for bundle in chosen]


def _claim(
    world: World,
    nodes: Sequence[Node],
    share: ActorResources,
    strategy: PlacementStrategy,
    spares: int,
    job: str,
    *,
    grows: bool,
) -> tuple[Claim, list[Node]]:
    """Place the actors on the nodes, and log the placement.

    If the nodes have room that is not free yet, so that tensor groups stay whole, or if nodes are coming, Ray chooses
    the nodes later. STRICT_SPREAD is an exception, because separate placement groups can't express it.

    Returns:
        The groups to claim, and the nodes that may get actors.

    Raises:
        RoomError: The nodes would have no room even if all were free, and no nodes are coming.
    """
    whole, now = place(world, nodes, share, strategy, free=False), place(world, nodes, share, strategy)
    if whole.missing and (not grows or strategy == "STRICT_SPREAD"):
        fix = "ask for less in resources, " if share != ActorResources(share.device, share.gpus) else ""
        raise RoomError([no_room(world, nodes, fix + _STRATEGIES.get(strategy, TOO_SMALL), share)])
    waits = now.is_worse_than(whole)
    found = whole if waits else now
    blocks, used = blocks_of(world, found.split), list(nodes)
    spare = [((number,), "") for number in range(world.size, world.size + spares)]
    if waits and strategy != "STRICT_SPREAD":
        chosen = [tuple(range(world.size))] if strategy == "STRICT_PACK" else blocks
        return Claim(world, [*((block, "") for block in chosen), *spare], share, job), used
    if found.split:
        log.warning("%s", split_message(world, found, share))
    pins = [(block, node.id) for block in blocks if (node := found.nodes[block[0]]) is not None]
    used = [node for node in nodes if node.id in {pin for _, pin in pins}]
    if len(used) > 1:
        log.info("actors on %d nodes: %s", len(used), "; ".join(placement_lines(world, found, used)), extra=DETAIL)
    return Claim(world, [*pins, *spare], share, job), used


def _remote(cls: type, share: ActorResources) -> Any:
    """Return the remote class of the actors; created once, because each is pickled and sent."""
    decorate: Any = ray.remote  # its type annotations lack concurrency groups
    # No retries: a retried backward would add its gradients twice. The driver does the recovery.
    options = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {"ctl": 2, "disk": 1}}
    resources = dict(share.others)
    memory = int(resources.pop("memory", 0)) or None
    return decorate(num_cpus=share.cpus, num_gpus=share.gpus, memory=memory, resources=resources or None, **options)(
        cls
    )


def _actor(remote: Any, name: str, bundle: ActorBundle) -> Any:
    """Create an actor in its bundle."""
    strategy = PlacementGroupSchedulingStrategy(bundle.group, bundle.bundle)
    return remote.options(name=name, scheduling_strategy=strategy).remote()


def free_cpus_text() -> str:
    """Return the number of free CPUs of each node as text."""
    return "; ".join(f"{node.name} has {node.free.get('CPU', 0.0):g} free CPUs" for node in living_nodes())


def _connect() -> bool:
    """Connect to Ray unless this process is connected; return whether this call has connected, and so must close."""
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
        _start_ray()
    finally:
        os.umask(old)
    return True


def _start_ray(starts: int = 3) -> None:
    """Start Ray on this machine. It is started again where it was only late, up to so many times in all.

    Ray waits 30 s for its own node, which nothing changes; on a busy machine that can be too short.

    Raises:
        JobError: It does not start.
    """
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
    except BaseException as error:  # Ray raises many types; at a Ctrl-C, parts of Ray are running already
        _disconnect(type(error))
        if not isinstance(error, Exception):
            raise
        load = f"load {os.getloadavg()[0]:.0f} on {num_cores()} cores"
        is_late = "timed out" in str(error)
        if is_late and starts > 1:
            log.warning("Ray was not up in time on this machine (%s): it is started again", load)
            _start_ray(starts - 1)
            return
        fix = (
            f"try again when the machine is less busy ({load})"
            if is_late
            else f"see that /tmp (or RAY_TMPDIR) has room, and that no broken Ray of yours is left running; on a busy "
            f"machine ({load}), set {_PATIENCE} to more than the {os.environ[_PATIENCE]} s of now"
        )
        raise JobError(f"Ray does not start on this machine ({first_line(error)}): {fix}") from error


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the previous SIGTERM handler; without one, set a handler that unwinds the stack, first between two steps.

    So a job saves its run and ends. Ray's lower-level handler would abort the process after 3 s, while it saves.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        handler = Sigterm() if before is signal.SIG_DFL else before
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def pickled_copies(parts: T) -> T:
    """Return copies of objects as an actor gets them, with the closures of their functions.

    Args:
        parts: The objects, in a tuple.

    Raises:
        ConfigError: They can't be pickled for the actors, such as a function whose closure has a lock.
    """
    try:
        copies: T = ray.cloudpickle.loads(ray.cloudpickle.dumps(parts))
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(
            [f"model or data can't be sent to actors ({reason}): make such things inside the function"]
        ) from None
    return copies
