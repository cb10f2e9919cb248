"""The same run in another layout: the fields that may differ, and the checks of the layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from raypar.actors.machine.this_machine import computes_here, total_memory
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.data import Batches
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind
from raypar.config.conflicts.schedules import order_on
from raypar.config.run import unrecorded
from raypar.config.schedule import Programs
from raypar.errors import ConfigError
from raypar.job.layout.elastic import Layout, renumbered
from raypar.job.start.launchable import TrialRun, check_launch
from raypar.planner.resource_needs import sum_over_actors
from raypar.schedules.formatting import size

_SAME = (  # fields that must not differ
    *("seed", "model", "data", "optim", "clip", "steps", "micro_batch_size", "loss_scale", "nonfinite"),
    *("folder", "profile", "track", "max_failures", "snapshot_every"),
)
_LONGEST = 40  # characters of a value
_FIX = "job.reset(run, resume=job.save(folder)) changes it"


def other_layout(
    present: Layout, to: Run | None, changes: Mapping[str, Any], skeleton: Skeleton, device: DeviceKind
) -> Layout:
    """Check another layout of a run, and return it.

    With as many microbatches a step, whatever the number of replicas: where only the mesh changes, ``microbatches``
    follows. A microbatch keeps its number, and so its data and its dropout.

    Args:
        present: The run with all its replicas, as it is.
        to: The run in the other layout; None for the present one.
        changes: Fields that differ from that.
        skeleton: The model without weights.
        device: Device that the actors compute on.

    Raises:
        ConfigError: It can't be. Lists all faults.
    """
    before = present.run
    run = replace(before if to is None else to, **changes)
    faults = list[str]()
    right = isinstance(run.mesh, Mesh) and all(isinstance(n, int) for n in (run.mesh.dp, run.microbatches))
    if right and (run.mesh.dp, run.microbatches) != (before.mesh.dp, before.microbatches):
        total = before.microbatches * before.mesh.dp
        if to is None and "microbatches" not in changes and run.mesh.dp > 0 and total % run.mesh.dp == 0:
            run = replace(run, microbatches=total // run.mesh.dp)
        faults += _batch_faults(run, total)
        if isinstance(run.data, Batches) and run.data == before.data and run.mesh.dp > 0:
            run = replace(run, data=renumbered(run.data, before.mesh.dp, run.mesh.dp))
    faults += _same_faults(before, run)
    programs = None
    try:
        there = replace(unrecorded(run), nonfinite="stop")
        programs = check_launch(there, trial=TrialRun.of(there, skeleton), replaces=True)
    except ConfigError as error:
        faults += error.faults
    if programs is not None:
        faults += _layout_faults(run, programs, present, device)
    if programs is not None and not faults:
        faults += state_copy_faults(present, Layout(run, programs), skeleton)
    if faults or programs is None:
        raise ConfigError([f"relayout: {fault}" for fault in faults])
    return Layout(run, programs)


def state_copy_faults(present: Layout, there: Layout, skeleton: Skeleton) -> Iterator[str]:
    """Yield a fault if this machine lacks memory for the copies while the state moves: weights and state of the
    optimizer in both layouts, and the weights into which they are loaded."""
    has = total_memory() if computes_here(there.run.device) else None
    if has is None:
        return
    copies = sum_over_actors(
        present.run, present.programs["train"], skeleton, lambda memory: memory.weights + memory.optimizer
    )
    loaded = sum_over_actors(
        there.run, there.programs["train"], skeleton, lambda memory: 2 * memory.weights + memory.optimizer
    )
    if copies + loaded > has:
        text = f"copies of the state take {size(copies)}, and the other layout takes {size(loaded)} meanwhile"
        yield f"memory: {text}; this machine has {size(has)}: {_FIX.removesuffix(' changes it')} goes through the disk"


def _batch_faults(run: Run, total: int) -> Iterator[str]:
    """Yield a fault if a step would have another number of microbatches."""
    dp = run.mesh.dp
    if dp > 0 and run.microbatches * dp != total:
        if total % dp:
            text = f"a step of this run has {total} microbatches"
            yield f"{text}, and {total} is no multiple of {dp}: give another mesh.dp"
        else:
            text = f"microbatches is {run.microbatches} on each of {dp} replicas, but a step of this run has {total}"
            yield f"{text}: set it to {total // dp}"


def _same_faults(before: Run, run: Run) -> Iterator[str]:
    """Yield the fields that differ and must not."""
    for field in _SAME:
        one, other = getattr(before, field), getattr(run, field)
        if isinstance(one, Batches) and isinstance(other, Batches) and isinstance(run.mesh, Mesh):
            one, other = (renumbered(data, of.mesh.dp, before.mesh.dp) for data, of in ((one, before), (other, run)))
        if one != other:
            text = _differs(field, one, other)
            yield f"{text}, and a relayout changes no number of the run: leave it as it is; {_FIX}"


def _differs(field: str, before: object, now: object) -> str:
    """Return a sentence that a field differs, with both values if they are short."""
    values = repr(now), repr(before)
    if max(map(len, values)) > _LONGEST:
        return f"{field} is another one"
    return f"{field} is {values[0]} and was {values[1]}"


def _layout_faults(run: Run, programs: Programs, present: Layout, device: DeviceKind) -> Iterator[str]:
    """Yield what is wrong with another layout on these actors."""
    if run.shared_gpu != (before := present.run.shared_gpu):
        yield f"shared_gpu must stay {before!r}, as actors stay; launch anew for {run.shared_gpu!r}"
    if run.device not in ("auto", device):
        yield f"device must stay {device!r}, as actors stay; launch anew for {run.device!r}"
    yield from order_on(run, device)
    for what, schedule in (("is", present.programs["train"]), ("would be", programs["train"])):
        if schedule.stream:
            fix = "its steps are others in another layout: " + _FIX
            yield f"schedule {schedule.name!r} {what} asynchronous, and {fix}"
