"""Check what does not combine with different numbers of replicas or tensor ranks on each pipeline rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from raypar.actors.specs.model import Layers, Transformer
from raypar.actors.specs.run import Run
from raypar.config.validate.parallel import tensor_faults


def uneven_faults(run: Run, right: Callable[..., bool]) -> Iterator[str]:
    """Yield what a run with ``mesh.rank_dp`` or ``mesh.rank_tp`` can't have, each with its fix.

    Args:
        run: The run.
        right: Returns whether some fields have their declared types and ranges.
    """
    if not right("mesh") or not run.mesh.is_uneven:
        return
    named = "mesh.rank_dp" if run.mesh.rank_dp else "mesh.rank_tp"
    for field, fits, why, fix in _FITTING:
        if right(field) and not fits(getattr(run, field)):
            yield f"{field} is {getattr(run, field)!r}, but with {named} {why}: {fix}"
    if right("microbatches"):
        yield from turn_faults(run)
    if not right("model"):
        return
    if isinstance(run.model, Transformer) and run.model.moe is not None:
        told = "model.moe is given, but replicas that take microbatches in turn do not sum the loads of their experts"
        yield f"{told}: set model.moe to None, or give mesh.dp or mesh.tp for all ranks"
    if run.mesh.rank_tp:
        yield from _tensor_faults(run, right)


def turn_faults(run: Run) -> Iterator[str]:
    """Yield why the replicas of a pipeline rank can't take the microbatches of a step in turn.

    Args:
        run: The run, whose mesh and microbatches have their declared types and ranges.
    """
    least = math.lcm(1, *run.mesh.rank_dp)
    if run.microbatches % least:
        each = -(-run.microbatches // least) * least
        why = f"mesh.rank_dp is {run.mesh.rank_dp}, and as many replicas take a step's microbatches in turn"
        yield f"microbatches is {run.microbatches}, but {why}: set it to {each}, or to another multiple of {least}"


def _tensor_faults(run: Run, right: Callable[..., bool]) -> Iterator[str]:
    """Yield why a model cannot be divided over the tensor ranks of each pipeline rank."""
    counts = run.mesh.rank_tp
    if isinstance(run.model, Layers):
        yield "mesh.rank_tp is given, but own layers are divided alike on all ranks: give mesh.tp, or leave it out"
        return
    if right("data_parallel", "sequence_parallel"):
        for tp in sorted(set(counts)):
            faults = tensor_faults(run.model, tp, run.data_parallel, sequence=False, plan="")
            yield from (fault.replace("mesh.tp", "mesh.rank_tp") for fault in faults)
    if len(counts) == run.mesh.pp and counts[0] != counts[-1] and getattr(run.model, "tied", False):
        yield (
            f"mesh.rank_tp is {counts}, but model.tied ties weights of the first rank to the last one, which are "
            f"divided otherwise: set model.tied to False, or give both ranks {max(counts[0], counts[-1])}"
        )


_FITTING: tuple[tuple[str, Callable[[object], bool], str, str], ...] = (
    ("zero", lambda value: not value, "every replica of a rank updates all its weights", "leave zero out"),
    ("data_parallel", lambda value: value == "all_reduce", "there are no servers", "set it to 'all_reduce'"),
    ("offload", lambda value: value == "none", "weights stay on the device", "set it to 'none'"),
    ("sequence_parallel", lambda value: not value, "stages pass whole sequences", "set it to False"),
    ("max_failures", lambda value: not value, "a run ends with its first failure", "set it to 0"),
    ("recheck_every", lambda value: not value, "no other actor computes a microbatch again", "set it to 0"),
    ("overflow_every", lambda value: not value, "overflow is not counted", "set it to 0"),
)
