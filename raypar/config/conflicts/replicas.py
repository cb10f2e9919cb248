"""Rules of replicas: ZeRO, parameter servers, offloading, and the comparison of replicas."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from raypar.actors.machine.files import expanded
from raypar.actors.machine.this_machine import starts_own_ray
from raypar.actors.specs.model import Layers
from raypar.actors.specs.worlds import world_of
from raypar.config.conflicts.named_settings import (
    EP,
    EXPERT_ACTORS,
    OFFLOAD,
    OFFLOADED_WEIGHTS,
    RECHECK,
    SERVERS,
    SHARDED_WEIGHTS,
)
from raypar.config.rules import Conflict, Examined, RunRule, RunSetting, several, unusual

if TYPE_CHECKING:
    from torch import nn

_GATHERS = tuple(map(unusual, ("zero_units", "zero_gather", "zero_resident", "reshard_after_forward")))
_ON_DEVICE = RunSetting("activations_on_device", lambda most: most is not None)
_FOLDER = RunSetting("offload_folder", lambda folder: folder is not None)
_COPIES = RunSetting("mesh.shard", lambda shard: shard is not None and shard > 1)
_RESIDENT = RunSetting("zero_resident", lambda most: most is not None)
_RECOMPUTED = RunSetting("recompute", "full")
_SERVED = "set data_parallel to 'parameter_server'"
_ALPHA = "set model.moe.bias_rate to 0 and give alpha"
_FREES = RunSetting(
    "run",
    lambda run: run.zero_gather == "microbatch" and (run.zero == 3 or run.offload == "parameters"),
    "zero_gather is 'microbatch'",
    "set zero_gather to 'step'",
)
_CHECK = RunSetting("check_every", undo="set it to 0")
_ONE = RunSetting("run", lambda run: run.mesh.ways("dp") * run.mesh.cp == 1, "there is one replica (dp x cp)")
_ALL_SHARDED = RunSetting(
    "run", lambda run: run.zero == 3 and run.mesh.shards == run.mesh.ways("dp") * run.mesh.cp > 1, "zero is 3"
)
_NO_TWO = "but {other}, so no two actors hold the same weights"
_A_WHILE = "but {other}, so weights are on an actor only for a while"
_TOGETHER = "but experts are divided over actors, which compute the tokens of several replicas together"
_CHECK_COPIES = "set it to 0 (with mesh.shard, copies of shards are compared)"


def _idle_gathers(examined: Examined) -> Iterator[str]:
    """Yield the settings of gathers if no weights are gathered."""
    run = examined.run
    if run.zero == 3 or run.offload == "parameters" or SERVERS.is_in(examined):
        return
    for setting in _GATHERS:
        if setting.is_in(examined):
            only = "only zero 3 and offload 'parameters' gather weights"
            yield f"{setting.words(examined)}, but zero is {run.zero}: {only}, leave it out"


def _one_shard(examined: Examined) -> Iterator[str]:
    """Yield a fault if ZeRO shards over one replica."""
    run = examined.run
    if (run.zero or 0) > 1 and run.mesh.shards == 1 and not SERVERS.is_in(examined):
        fix = "set mesh.dp (or mesh.cp) to 2 or more, or leave zero out"
        yield f"zero is {run.zero}, but there is one replica to share out to: {fix}"


def _offload_folder_faults(examined: Examined) -> Iterator[str]:
    """Yield the faults of the folder for offloading, if actors run on this machine."""
    folder = examined.run.offload_folder
    if folder is None or not OFFLOAD.is_in(examined) or not starts_own_ray():
        return
    named, fix = f"offload_folder {folder!r}", "give the path of a folder of a fast disk"
    if not folder.strip():
        yield f"{named} has no name: {fix}"
        return
    try:
        path = expanded(folder)
        if not os.path.lexists(path):
            yield f"{named} is not there: make it, or {fix}"
        elif not path.is_dir():
            yield f"{named} is no folder: {fix}"
        else:
            tempfile.TemporaryFile(dir=path).close()  # as the actors will; it has no name
    except (OSError, ValueError) as error:
        yield f"{named} can't be used ({getattr(error, 'strerror', None) or error}): {fix}"


def share_faults(examined: Examined) -> Iterator[str]:
    """Yield a fault if a pipeline rank has fewer parameters than servers. One server is always allowed.

    Args:
        examined: A run whose layers fit its schedule.
    """
    run, schedule = examined.run, examined.train
    if world_of(run).servers < 2:
        return
    from raypar.actors.worker.build.weight_owners import sizes_of  # imports torch

    sizes = sizes_of(examined.skeleton.model, run.split, schedule)
    fewest, pp = min((len(sizes.get(pp, {})), pp) for pp in range(schedule.num_ranks))
    if run.servers > fewest:
        fix = f"use {max(1, fewest)} at most"
        yield f"servers is {run.servers}, but pp={pp} has {fewest} parameters, and each is on one server: {fix}"


_GATHER_RULES = (Conflict(setting, SERVERS, fix="servers shard nothing, leave it out") for setting in _GATHERS)
ZERO_RULES: tuple[RunRule, ...] = (
    Conflict(RunSetting("servers", several), RunSetting("data_parallel", "all_reduce", undo=_SERVED)),
    Conflict(RunSetting("zero"), SERVERS, fix="servers hold the optimizer, leave zero out"),
    Conflict(
        RunSetting("model.moe.bias_rate", undo=_ALPHA), SERVERS, "but with servers replicas do not sum their loads"
    ),
    Conflict(unusual("zero_reduce"), SERVERS, fix="servers shard nothing, leave it out"),
    *_GATHER_RULES,
    _one_shard,
    Conflict(_COPIES, RunSetting("zero", 0, undo="set zero to 1, 2 or 3"), "but zero is 0, which shards nothing"),
    _idle_gathers,
    Conflict(_RESIDENT, _FREES, "but {other}, which frees weights after every action"),
    Conflict(OFFLOAD, SERVERS, "but parameter servers hold the optimizer"),
    Conflict(_FOLDER, RunSetting("offload", "none", undo="set offload to 'optimizer' or 'parameters'")),
    _offload_folder_faults,
)
HOST_RULES: tuple[RunRule, ...] = (
    Conflict(_ON_DEVICE, _RECOMPUTED, "but with recompute=full only inputs are kept, which are small"),
    Conflict(_ON_DEVICE, SHARDED_WEIGHTS, "but with zero=3 graphs keep weights that come and go"),
    Conflict(_ON_DEVICE, OFFLOAD, "but {other}, which uses the same way"),
    Conflict(_ON_DEVICE, EXPERT_ACTORS, "but expert actors keep rows of experts by themselves"),
)


def sharing_faults(examined: Examined) -> Iterator[str]:
    """Yield the weights of the user's layers that sharding would break, if a run shards weights.

    Args:
        examined: A run whose layers fit its schedule.
    """
    run, skeleton = examined.run, examined.skeleton
    if not isinstance(run.model, Layers):
        return
    names, modules = skeleton.model.names, skeleton.model.skeleton
    if run.zero == 3:
        yield from _freed_faults(names, modules)
    elif world_of(run).sharded:
        from raypar.actors.data_parallel.replica_checks import overlapping  # imports torch

        for one, other in overlapping(names, modules):
            if one.learns and other.learns:
                yield (
                    f"model: {one.name} and {other.name} overlap in memory, and each replica updates its own parts of "
                    "them: make them one parameter, or compute one from the other in the forward, or set zero to 0"
                )


def _freed_faults(names: Sequence[str], modules: Sequence[nn.Module]) -> Iterator[str]:
    """Yield the weights that are used, or share memory, where a layer that does not have them may not be running."""
    from raypar.actors.data_parallel.replica_checks import overlapping  # imports torch
    from raypar.actors.models.init.unregistered import borrowed

    between = set()
    for layer, owner, name in borrowed(modules):
        between |= {(layer, owner), (owner, layer)}
        yield (
            f"model: {names[layer]} uses {names[owner]}.{name} without registering it, and zero is 3, which has "
            f"weights only while their layer runs: make the module or the parameter an attribute of {names[layer]} (it "
            "is one tied weight then), or set zero to 2"
        )
    for one, other in overlapping(names, modules):
        if (one.layer, other.layer) not in between:
            yield (
                f"model: {one.name} and {other.name} overlap in memory, and zero is 3, which gives each memory of its "
                "own: make them one parameter, or compute one from the other in the forward, or set zero to 2"
            )


def _fewest_faults(examined: Examined) -> Iterator[str]:
    """Yield a fault if there are fewer replicas than a run may go on with."""
    run = examined.run
    if run.min_dp > run.mesh.dp:
        there = "is 1 replica" if run.mesh.dp == 1 else f"are {run.mesh.dp} replicas"
        yield f"min_dp is {run.min_dp}, but there {there}: set it to {run.mesh.dp} at most"


def _snapshot_faults(examined: Examined) -> Iterator[str]:
    """Yield a fault if snapshots are taken after steps in which weights are not compared."""
    run = examined.run
    if run.check_every and run.max_failures and run.snapshot_every % run.check_every:
        yield (
            f"snapshot_every is {run.snapshot_every}, and check_every {run.check_every}: a snapshot would hold what no "
            f"check has seen, so set snapshot_every to {run.check_every} or a multiple"
        )


REPLICA_RULES: tuple[RunRule, ...] = (
    _fewest_faults,
    Conflict(RECHECK, RunSetting("mesh.dp", 1), "but {other}, so no other actor has the same weights", RECHECK.undo),
    Conflict(RECHECK, SERVERS, "but replicas of servers do not talk to each other", RECHECK.undo),
    *(Conflict(RECHECK, experts, _TOGETHER, RECHECK.undo) for experts in (EP, EXPERT_ACTORS)),
    Conflict(RECHECK, SHARDED_WEIGHTS, _A_WHILE, RECHECK.undo),
    Conflict(RECHECK, OFFLOADED_WEIGHTS, _A_WHILE, RECHECK.undo),
    Conflict(_CHECK, _ONE, "but {other}, so nothing to compare", _CHECK.undo),
    Conflict(_CHECK, SERVERS, "but servers send replicas their weights in every step", _CHECK.undo),
    Conflict(_CHECK, _ALL_SHARDED, _NO_TWO, _CHECK_COPIES),
    Conflict(_CHECK, OFFLOADED_WEIGHTS, _NO_TWO, _CHECK.undo),
    _snapshot_faults,
)
