"""Check the settings of ZeRO.

Check the parameter servers of a run.

Check what a run keeps away from the devices of its actors, and the folder for it.

Check what does not combine with activations that wait in host memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from raypar.actors.files import expanded
from raypar.actors.specs.model import Transformer
from raypar.actors.specs.run import Run
from raypar.planner.hardware.this_machine import starts_own_ray

_GATHERS = ("zero_units", "zero_gather", "zero_resident", "reshard_after_forward")


def zero_faults(run: Run, right: Callable[..., bool]) -> Iterator[str]:
    """Yield the settings of ZeRO that have nothing to do, or contradict each other.

    Args:
        run: The run.
        right: Returns whether some fields have their declared types and ranges.
    """
    if not right("zero", "mesh", "data_parallel", "offload"):
        return
    if run.data_parallel == "parameter_server":
        for field, given in _given(run, right, "zero_reduce", *_GATHERS):
            yield f"{field} is {given!r}, but data_parallel is 'parameter_server': servers shard nothing, leave it out"
        return
    if (run.zero or 0) > 1 and run.mesh.shards == 1:
        fix = "set mesh.dp (or mesh.cp) to 2 or more, or leave zero out"
        yield f"zero is {run.zero}, but there is one replica to share out to: {fix}"
    if run.mesh.shard is not None and run.mesh.shard > 1 and run.zero == 0:
        fix = "leave mesh.shard out, or set zero to 1, 2 or 3"
        yield f"mesh.shard is {run.mesh.shard}, but zero is 0, which shards nothing: {fix}"
    if run.zero != 3 and run.offload != "parameters":
        for field, given in _given(run, right, *_GATHERS):
            only = "only zero 3 and offload 'parameters' gather weights"
            yield f"{field} is {given!r}, but zero is {run.zero}: {only}, leave it out"
    elif run.zero_resident is not None and run.zero_gather != "step":
        yield (
            f"zero_resident is {run.zero_resident}, but zero_gather is {run.zero_gather!r}, which frees weights behind "
            "every action: set zero_gather to 'step', or leave zero_resident out"
        )


def _given(run: Run, right: Callable[..., bool], *names: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields among these that have another value than the usual one, each with it."""
    for name in names:
        if right(name) and (given := getattr(run, name)) != getattr(Run, name):
            yield name, given


def server_faults(run: Run, right: Callable[..., bool]) -> Iterator[str]:
    """Yield the settings that do not go together with parameter servers, or need them.

    Args:
        run: The run.
        right: Returns whether some fields have their declared types and ranges.
    """
    if right("servers", "data_parallel") and run.servers > 1 and run.data_parallel != "parameter_server":
        fix = "leave servers out, or set data_parallel to 'parameter_server'"
        yield f"servers is {run.servers}, but data_parallel is {run.data_parallel!r}: {fix}"
    if right("zero", "data_parallel") and run.zero and run.data_parallel == "parameter_server":
        yield f"zero is {run.zero}, but data_parallel is 'parameter_server': servers hold the optimizer, leave zero out"
    served = right("model", "data_parallel") and run.data_parallel == "parameter_server"
    if served and isinstance(run.model, Transformer) and run.model.moe is not None and run.model.moe.bias_rate:
        told = f"model.moe.bias_rate is {run.model.moe.bias_rate:g}, but with servers replicas do not sum their loads"
        yield f"{told}: set data_parallel to 'all_reduce', or bias_rate to 0 and give alpha"


def offload_faults(run: Run, right: Callable[..., bool]) -> Iterator[str]:
    """Yield the reasons why a run can't offload as it says, each with its fix.

    Args:
        run: The run.
        right: Returns whether some fields have their declared types and ranges.
    """
    if right("offload", "data_parallel") and run.offload != "none" and run.data_parallel == "parameter_server":
        fix = "set data_parallel to 'all_reduce', or leave offload out"
        yield f"offload is {run.offload!r}, but parameter servers hold the optimizer: {fix}"
    if not right("offload", "offload_folder") or run.offload_folder is None:
        return
    if run.offload == "none":
        fix = "leave the folder out, or set offload to 'optimizer' or 'parameters'"
        yield f"offload_folder is {run.offload_folder!r}, but offload is 'none': {fix}"
    if run.offload != "none" and starts_own_ray():  # else the actors look, on their nodes
        yield from (f"offload_folder {run.offload_folder!r} {fault}" for fault in _folder_faults(run.offload_folder))


def _folder_faults(folder: str) -> Iterator[str]:
    fix = "give the path of a folder of a fast disk"
    if not folder.strip():
        yield f"has no name: {fix}"
        return
    try:
        path = expanded(folder)
        if not os.path.lexists(path):
            yield f"is not there: make it, or {fix}"
        elif not path.is_dir():
            yield f"is no folder: {fix}"
        else:
            tempfile.TemporaryFile(dir=path).close()  # as the actors will; it has no name
    except (OSError, ValueError) as error:
        yield f"can't be used ({getattr(error, 'strerror', None) or error}): {fix}"


def host_faults(run: Run, right: Callable[..., bool]) -> Iterator[str]:
    """Yield what a run with ``activations_on_device`` can't have, each with its fix.

    Args:
        run: The run.
        right: Returns whether some fields have their declared types and ranges.
    """
    if not right("activations_on_device") or run.activations_on_device is None:
        return
    named = f"activations_on_device is {run.activations_on_device}"
    if right("recompute") and run.recompute == "full":
        yield f"{named}, but with recompute=full only inputs are kept, which are small: leave one of the two out"
    if right("zero") and run.zero == 3:
        fix = "leave activations_on_device out, or set zero to 2"
        yield f"{named}, but with zero=3 graphs keep weights that come and go: {fix}"
    if right("offload") and run.offload != "none":
        yield f"{named}, but offload is {run.offload!r}, which uses the same way: leave one of the two out"
    if right("mesh") and run.mesh.expert_actors:
        yield f"{named}, but expert actors keep rows of experts by themselves: set mesh.expert_actors to 0"
