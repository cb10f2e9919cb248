"""Resume from a checkpoint: find it, check that the run can continue from it, and that the run can save others."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from raypar.actors.checkpoint.logical import DTYPES, Logical
from raypar.actors.errors import CheckpointError
from raypar.actors.machine.hub_names import download_hint
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.optim.lr import lr_at
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.checkpoint.base import base_faults
from raypar.checkpoint.check import checkpoint_faults, verified
from raypar.checkpoint.find import VerifiedCheckpoint, instead_of, listed, newest
from raypar.checkpoint.manifest import MANIFEST
from raypar.checkpoint.save import Save
from raypar.config.conflicts.outputs import is_under_way
from raypar.config.conflicts.parallel import idle_fields
from raypar.config.fields import FieldFault, field_faults, short_repr
from raypar.config.schedule import Programs
from raypar.config.toml import as_begun, flat, plain_of
from raypar.errors import ConfigError
from raypar.job.start.launchable import TrialRun, check_launch
from raypar.paths import AUTO, CHECKPOINTS, RUN, absolute, checkpoints_in, holds_run, step_of

log = logging.getLogger(__name__)

_MAY_VARY = (  # fields whose changes are allowed (except optim.kind) and logged
    *("model.attention", "model.linear", "model.hf", "model.lora.hf", "data", "microbatches", "micro_batch_size"),
    *("mesh.dp", "mesh.rank_dp", "optim", "clip", "ema", "steps"),
)
_JUMP = 0.1  # relative difference of a learning rate from that of the curve before


def find(
    path: Path,
    typed: str | None = None,
    otherwise: str | None = None,
) -> VerifiedCheckpoint:
    """Find a checkpoint.

    Args:
        path: A checkpoint, or a run folder or folder of checkpoints, whose newest sound checkpoint is meant.
        typed: What the user calls it where nothing is resumed; None for a run that goes on.
        otherwise: What to do if there is no sound checkpoint; None for a run that goes on.

    Raises:
        ConfigError: There is no sound checkpoint.
    """
    folder, named = absolute(path), path
    if others := instead_of(folder):
        raise ConfigError([others if typed else f"resume: {others}"])
    if not os.path.lexists(folder):
        missing = f"there is no {typed or str(path)!r}: correct the path"
        raise ConfigError([f"{missing}{download_hint(typed)}" if typed else f"resume: {missing}"])
    path = checkpoints_in(folder)
    one = step_of(path.name) is not None or os.path.lexists(path / MANIFEST)
    has_none = holds_run(folder) and not path.exists()
    try:
        found = VerifiedCheckpoint(path, verified(path)) if one else None if has_none else newest(path)
    except CheckpointError as error:
        what = f"resume {str(path)!r}" if one else "resume"  # the faults of a folder name it already
        what = repr(typed) if typed else what
        busy = _unsaved(folder, typed) if not one and not path.exists() else ""
        raise ConfigError([busy] if busy else [f"{what}: {fault}" for fault in error.faults]) from error
    if found is None:
        anew = "start anew, without resume"
        if holds_run(folder):
            again = f"raypar train {quote(str(named / RUN))} --folder {quote(str(named))} --overwrite"
            anew = f"begin its run anew with {again} (in Python launch(run, overwrite=True))"
        otherwise = otherwise or f"give another folder, or {anew}"
        lack = f"{repr(typed) if typed else f'resume {str(path)!r}'}: there is no sound checkpoint in it: {otherwise}"
        raise ConfigError([_unsaved(folder, typed) or lack])
    return found


def _unsaved(folder: Path, typed: str | None) -> str:
    """Return a fault if a run is under way in a folder that has no checkpoint yet; else ""."""
    try:
        busy = is_under_way(folder)
    except OSError:
        busy = False
    fix = "wait for its first one (save_every says when), or end it, or give another folder"
    what = repr(typed) if typed else f"resume {str(folder)!r}"
    return f"{what}: it holds a run that is under way and has saved no checkpoint yet: {fix}" if busy else ""


class Prepared(NamedTuple):
    """A checked run.

    Attributes:
        run: The run, with what it keeps of the checkpoint's.
        programs: Its lowered schedules.
        trial: Copies of its model and data, which may be called here.
        found: The checkpoint that it goes on from; None for a new run.
    """

    run: Run
    programs: Programs
    trial: TrialRun
    found: VerifiedCheckpoint | None

    @property
    def skeleton(self) -> Skeleton:
        """Its model without weights."""
        return self.trial.skeleton

    @property
    def taken(self) -> int:
        """Number of steps that were taken before it begins."""
        return 0 if self.found is None else self.found.manifest.step


def prepared(
    run: Run,
    resume: str | PathLike[str] | VerifiedCheckpoint | None,
    *,
    overwrite: bool = False,
    replaces: bool = False,
    convert: Callable[[Run], None] = lambda _: None,
    besides: Callable[[Run], Iterable[str]] = lambda _: (),
) -> Prepared:
    """Check a run, its checkpoint and its folder, before any actor starts.

    Args:
        run: The run.
        resume: Checkpoint to continue from: a path (see ``find``) or the checkpoint itself; None for a new run.
        overwrite: Whether the run replaces one that is in its folder.
        replaces: Whether the actors of another run take it.
        convert: Converts the data of a run that has no faults otherwise.
        besides: Returns further faults of the run.

    Raises:
        ConfigError: The run has faults, cannot continue from the checkpoint, or cannot use its folder.
    """
    found, wrong = _begun_from(resume)
    if found is not None:
        run = as_begun(run, found.manifest.run)
    trial, resumed = TrialRun.of(run), None if found is None else found.path
    try:
        programs = check_launch(
            run,
            resumed,
            trial,
            overwrite=overwrite,
            wrong=wrong,
            replaces=replaces,
            convert=convert,
            others=[*besides(run)],
        )
    except ConfigError as error:
        if found is None or any(fault.of_type for fault in field_faults(run)):
            raise
        raise ConfigError([*error.faults, *changed_faults(run, found)]) from None
    for idle in idle_fields(run):
        log.warning("%s", idle)
    if found is not None:
        demand_resumable(run, trial.skeleton, found)
        if (taken := found.manifest.step) >= run.steps:
            left = f"train() has nothing to do; for more, give steps={taken + max(1, taken // 2)}"
            log.warning("%s has taken all %d steps of this run: %s", found.path.name, run.steps, left)
    if run.folder != AUTO and not (overwrite and run.folder is not None and holds_run(absolute(run.folder))):
        demand_room(run, 0 if found is None else found.manifest.step)
    return Prepared(run, programs, trial, found)


def _begun_from(
    resume: str | PathLike[str] | VerifiedCheckpoint | None,
) -> tuple[VerifiedCheckpoint | None, list[FieldFault]]:
    """Return the checkpoint to continue from, and what is wrong with its path."""
    if not isinstance(resume, str | PathLike):
        return resume, []
    try:
        return find(Path(resume)), []
    except ConfigError as error:
        return None, [FieldFault("folder", text, of_type=True) for text in error.faults]


def demand_resumable(run: Run, skeleton: Skeleton, found: VerifiedCheckpoint) -> None:
    """Check that a run can continue from a checkpoint, and log the changed fields that affect its numbers.

    Args:
        run: The run.
        skeleton: Skeleton of its model.
        found: The checkpoint.

    Raises:
        ConfigError: The run differs from the checkpoint's in a field that must not change. Lists all of them.
    """
    faults, changed = _compared(run, found)
    if not any(fault.startswith("model") for fault in faults):
        stored = found.manifest.tensors
        if any(
            name == "optim.kind" for name, _, _ in changed
        ):  # one fault is enough, without one for each tensor of optimizer state
            stored = {name: logical for name, logical in stored.items() if not name.startswith("optim.")}
        differing = [*_tensor_faults(run, skeleton, stored)]
        faults += _of_own_layers(differing) if isinstance(run.model, Layers) else differing
        faults += base_faults(run, found)
    ConfigError.raise_if(f"resume {str(found.path)!r}: {fault}" for fault in faults)
    for name, now, was in changed:
        if name.startswith(_MAY_VARY):
            log.warning("resumed with %s %s, which was %s", name, now, was)
    before = found.manifest.run.get("steps")
    if isinstance(before, int) and not any(name.startswith("optim.") for name, _, _ in changed):
        for jump in rate_jumps(run, found.manifest.step, before):
            log.warning("%s", jump)


def rate_jumps(run: Run, taken: int, before: int) -> Iterator[str]:
    """Yield a sentence if the learning rate jumps where a run goes on, as another number of steps stretches its curve.

    Args:
        run: The run.
        taken: Number of steps that were taken.
        before: Number of steps of the curve before.
    """
    old, new = (lr_at(run.optim, taken, steps) for steps in (before, run.steps))
    if taken and abs(new - old) > _JUMP * old:
        last = lr_at(run.optim, taken - 1, before)
        curve = f"its curve is that of {run.steps:,} steps now, and was that of {before:,}"
        yield f"the learning rate jumps from {last:.3g} in step {taken:,} to {new:.3g} in step {taken + 1:,}: {curve}"


def changed_faults(run: Run, found: VerifiedCheckpoint) -> list[str]:
    """Return which fields of a run differ from the checkpoint's and must not; its weights are not looked at."""
    return [f"resume {str(found.path)!r}: {fault}" for fault in _compared(run, found)[0]]


def _compared(run: Run, found: VerifiedCheckpoint) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Return which fields must not differ from the checkpoint's, and all that do: their names and both values."""
    was, now = flat(found.manifest.run), flat(plain_of(run))
    changed = [
        (name, short_repr(now[name]), short_repr(was[name])) for name in now if name in was and was[name] != now[name]
    ]
    mine = "model.fn" in now and "model.fn" in was  # the user's own Layers, of which only the weights can be compared
    faults = [
        f"{name} is {new}, but {old} in the checkpoint: give the same"
        for name, new, old in changed
        if name in ("seed", "optim.kind") or (name.startswith("model.") and not mine and not name.startswith(_MAY_VARY))
    ]
    has_adapters = any(name.startswith("model.lora.") for name in now)
    had_adapters = any(name.startswith("model.lora.") for name in was)
    if had_adapters and not has_adapters:
        fix = f"give model.lora as it was (rank {was['model.lora.rank']}), or train what raypar ckpt export has merged"
        faults.append(f"model.lora is None, but the checkpoint has adapters alone: {fix}")
    elif has_adapters and not had_adapters and not mine:
        fix = "leave model.lora out, or train adapters of the folder that raypar ckpt export writes of it"
        faults.append(f"model.lora is given, but the checkpoint has all weights and no adapters: {fix}")
    if ("model.fn" in now) != ("model.fn" in was):
        faults.append("model is the user's own Layers in one of them only: give the run that was saved")
    return faults, changed


def demand_room(run: Run, step: int) -> None:
    """Check that a run can save its checkpoints, and that no checkpoint of a later step is in its folder.

    Args:
        run: The run.
        step: Number of steps taken before it begins.

    Raises:
        ConfigError: It cannot save them, or there is a later checkpoint.
    """
    if run.folder is None:
        return
    try:
        Save(absolute(run.folder) / CHECKPOINTS, step).abort()
    except CheckpointError as error:
        raise ConfigError([f"folder: {fault}" for fault in error.faults]) from error
    demand_latest(run, step)


def demand_latest(run: Run, step: int) -> None:
    """Check that no checkpoint of a later step is in a run's folder; nothing is written.

    Args:
        run: The run.
        step: Number of steps taken before it begins.

    Raises:
        ConfigError: There is a later checkpoint, or the folder can't be read.
    """
    folder = None if run.folder is None or run.folder == AUTO else absolute(run.folder) / CHECKPOINTS
    if folder is None or not folder.exists():
        return
    try:
        later = next((path for other, path in listed(folder) if other > step and not checkpoint_faults(path)), None)
    except CheckpointError as error:
        raise ConfigError([f"folder: {fault}" for fault in error.faults]) from error
    if later is not None:
        fix = "resume from it (end the run that writes there first, if one does), or give another folder"
        raise ConfigError([f"folder {str(folder)!r} has {later.name!r}, and this run begins at step {step + 1}: {fix}"])


def _as_fp32(dtype: str, wanted: tuple[str, tuple[int, ...]] | None) -> str:
    """Return the dtype that a stored weight counts as: masters of any precision go into any other."""
    return "F32" if wanted is not None and wanted[0] == "F32" and dtype in ("F16", "BF16") else dtype


def _of_own_layers(differing: Sequence[str]) -> list[str]:
    """Return one fault for all weights of the user's layers; without a weight, the faults as they are."""
    weights = [fault for fault in differing if fault.startswith("weight ")]
    if not weights:
        return [*differing]
    others = f", and so on, {len(weights)} weights in all" if len(weights) > 1 else ""
    fix = "give the layers that were saved, or leave resume out to begin anew"
    return [f"your own layers are not those that were saved: {weights[0]}{others}: {fix}"]


def _tensor_faults(run: Run, skeleton: Skeleton, stored: Mapping[str, Logical]) -> Iterator[str]:
    """Yield the differences between the model's tensors and the stored ones."""
    from raypar.actors.checkpoint.snapshot import AVERAGE, SCALER, buffer_name, logical_name
    from raypar.actors.optim.groups import rule_of
    from raypar.actors.optim.loss_scale import NUMBERS
    from raypar.actors.optim.optimizer import STATE_KEYS

    weights = skeleton.weights
    wanted = {name: (DTYPES[str(p.dtype).removeprefix("torch.")], tuple(p.shape)) for name, p in weights.items()}
    beside = {name: logical for name, logical in stored.items() if name.startswith(("optim.", "buffers."))}
    there = {
        name: (_as_fp32(logical.dtype, wanted.get(name)), logical.shape)
        for name, logical in stored.items()
        if name not in beside and name != SCALER
    }
    if SCALER in stored and stored[SCALER].shape != (NUMBERS,):
        yield f"{SCALER!r} has the shape {list(stored[SCALER].shape)}, and should have {[NUMBERS]}"
    for name in sorted(wanted.keys() | there.keys()):
        if name not in there or name not in wanted:
            yield f"weight {short_repr(name)} is {'not in it' if name in wanted else 'in it, but not in the model'}"
        elif there[name] != wanted[name]:
            (one, here), (other, was) = wanted[name], there[name]
            yield f"weight {short_repr(name)} is {one} {list(here)}, but {other} {list(was)} in the checkpoint"
    shapes = {buffer_name(0, name): shape for name, shape in skeleton.buffers.items()}
    moved = {buffer_name(0, name): shape for name, shape in skeleton.fixed.items()}  # frozen parameters may be there
    yield from (f"{short_repr(name)} is not in it" for name in shapes if name not in beside)
    for name, logical in beside.items():
        head, _, rest = name.partition(".")
        weight, _, kept = rest.rpartition(".")
        if head == "buffers":
            fits = (shapes | moved).get(buffer_name(0, rest.partition(".")[2])) == logical.shape
        else:
            keys = STATE_KEYS[rule_of(run.optim, weight, weights[weight].dim()).kind] if weight in weights else ()
            known = kept in keys or (kept == AVERAGE and weight in weights)
            fits = known and logical.shape == (() if kept == "step" else wanted[weight][1])
            fits = fits and (kept == AVERAGE or all(logical_name(weight, other) in beside for other in keys))
        if not fits:
            yield f"{short_repr(name)}, {logical.dtype} {list(logical.shape)}, belongs to another model or optimizer"
