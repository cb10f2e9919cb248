"""Rules of different numbers of replicas or tensor ranks on each pipeline rank."""

from __future__ import annotations

import math
from collections.abc import Iterator

from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.config.rules import Conflict, Examined, RunRule, RunSetting
from raypar.config.validate.parallel import divided_faults
from raypar.config.validate.settings import (
    CONTEXT,
    EP,
    EXPERT_ACTORS,
    EXPERTS,
    FAILURES,
    OFFLOAD,
    OVERFLOW,
    OWN_LAYERS,
    RANK_TP,
    RECHECK,
    REPLICAS,
    SEQUENCE,
    SERVERS,
    TENSOR,
    TIED,
    UNEVEN,
)

_ENDS = RunSetting("mesh.rank_tp", lambda counts: counts[:1] != counts[-1:])


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


def _width_faults(examined: Examined) -> Iterator[str]:
    """Yield why a model cannot be divided over the tensor ranks of each pipeline rank."""
    run = examined.run
    if isinstance(run.model, Layers):
        return
    for tp in sorted({*run.mesh.rank_tp} - {1}):
        yield from divided_faults(run.model, tp, "mesh.rank_tp")


_REASONS = {
    RunSetting("zero"): "every replica of a rank updates all its weights",
    SERVERS: "there are no servers",
    OFFLOAD: "weights stay on the device",
    SEQUENCE: "stages pass whole sequences",
    FAILURES: "a run ends with its first failure",
    RECHECK: "no other actor computes a microbatch again",
    OVERFLOW: "overflow is not counted",
    EXPERTS: "replicas that take microbatches in turn do not sum the loads of their experts",
}
_EACH = "leave one out, or give it for each rank as mesh.rank_"
_FIXES = {REPLICAS: f"{_EACH}dp", TENSOR: f"{_EACH}tp", **dict.fromkeys((CONTEXT, EP, EXPERT_ACTORS), "leave one out")}
_FOR_ALL = "which is for all ranks, and does not combine with {other}"
UNEVEN_RULES: tuple[RunRule, ...] = (
    *(Conflict(one, axis, _FOR_ALL, fix) for one, fix in _FIXES.items() for axis in UNEVEN),
    *(Conflict(one, axis, f"but with {{other}} {why}") for one, why in _REASONS.items() for axis in UNEVEN),
    lambda examined: turn_faults(examined.run),
    Conflict(OWN_LAYERS, RANK_TP, "but with {other} each rank divides layers in its own way"),
    _width_faults,
    Conflict(_ENDS, TIED, "but model.tied ties weights of the first rank to the last one, which are divided otherwise"),
)
