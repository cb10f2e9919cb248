"""Check the settings of ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from raypar.actors.specs.run import Run

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
