"""Resuming on the command line: the checkpoint's run, what keeps a run from going on, and how one goes on."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.actors.machine.files import expanded
from raypar.actors.specs.run import Run
from raypar.cli.words.parsing import values_of
from raypar.config.toml import recorded_run
from raypar.errors import ConfigError
from raypar.paths import CHECKPOINTS, absolute, holds_run, run_folder_of
from raypar.schedules.reading.user_code import names_code

if TYPE_CHECKING:
    from raypar.checkpoint.find import VerifiedCheckpoint


def begun_by(words: Sequence[str]) -> tuple[VerifiedCheckpoint | None, list[str]]:
    """Return the checkpoint that ``--resume`` names, if it does, and why it can't be read."""
    path = typed_checkpoint(words)
    if not path:
        return None, []
    from raypar.job.start.resume import find  # imports numpy

    try:
        return find(Path(path)), []
    except ConfigError as error:
        return None, error.faults


def typed_checkpoint(words: Sequence[str]) -> str:
    """Return the path that ``--resume`` names; "" if it names none."""
    return next((path for path in values_of("--resume", words) if path and not path.startswith("--")), "")


def checkpoint_at(
    path: Path, *, ema: bool, typed: str = "", otherwise: str = "give another folder"
) -> VerifiedCheckpoint:
    """Return the checkpoint at a path: of a run the newest one, and if ``ema`` with its averages as its weights.

    Args:
        path: A run folder, a folder of checkpoints, or a checkpoint.
        ema: Whether the moving averages of the weights are asked for, which a run with ema keeps.
        typed: What the user calls it; "" for its path.
        otherwise: What to do if it is a folder without a checkpoint.

    Raises:
        ConfigError: There is no checkpoint, or it has no averages.
    """
    from raypar.checkpoint.find import averaged
    from raypar.job.start.resume import find  # imports numpy

    found = find(path, typed or str(path), otherwise)
    return averaged(found) if ema else found


def its_run(found: VerifiedCheckpoint, typed: str = "") -> Run:
    """Return a checkpoint's run, with the run folder that the checkpoint is in now; it may have been moved.

    Args:
        found: The checkpoint.
        typed: The path by which the user named it: if it is relative, the folder is too. "" for an absolute folder.
    """
    run, folder = recorded_run(found.manifest.run), run_folder_of(found.path)
    if folder is None:
        return run
    is_relative = bool(typed) and not expanded(typed).is_absolute()
    return replace(run, folder=os.path.relpath(folder) if is_relative else str(folder))


def resume_faults(run: Run, begun: VerifiedCheckpoint | None, overwrite: bool, *, is_sound: bool) -> list[str]:
    """Return why a run cannot go on from a checkpoint or from what is in its folder; log what it changes.

    Args:
        run: The run.
        begun: The checkpoint; None for a new run.
        overwrite: Whether the run replaces one that is in its folder.
        is_sound: Whether the run has no faults of its own, so that its weights can be compared with the checkpoint's.
    """
    if begun is None and run.folder is None:
        return []
    from raypar.job.start.resume import changed_faults, demand_latest, demand_resumable

    faults = []
    try:
        if begun is not None and is_sound:
            from raypar.actors.models.skeleton import Skeleton

            demand_resumable(run, Skeleton(run.model, run.seed), begun)
        elif begun is not None:
            faults += changed_faults(run, begun)
    except ConfigError as error:
        faults += error.faults
    try:
        if not overwrite and not _holds_another(run, begun):
            demand_latest(run, 0 if begun is None else begun.manifest.step)
    except ConfigError as error:
        faults += error.faults
    except OSError:  # of its path, which is a fault of the run itself
        pass
    return faults


def _holds_another(run: Run, begun: VerifiedCheckpoint | None) -> bool:
    """Return whether the folder of a run holds another one already, which is a fault of the run itself."""
    folder = None if run.folder is None else absolute(run.folder)
    return folder is not None and holds_run(folder) and (begun is None or run_folder_of(begun.path) != folder)


def finished(begun: VerifiedCheckpoint, steps: int, words: Sequence[str]) -> str:
    """Say that a checkpoint's run is finished, and the command with which it goes on: the same one, with more steps.

    Args:
        begun: The checkpoint.
        steps: The steps of the run that is to go on from it.
        words: The words of the command.
    """
    taken = begun.manifest.step
    saved, typed = its_run(begun).steps, [*values_of("--steps", words)]
    enough = saved if saved > taken else 2 * taken
    others = shlex.join(
        [word for word, before in zip(words, ["", *words], strict=False) if not _of_steps(word, before)]
    )
    more = f"for more, raypar train {others} --steps {enough}"
    if typed:
        return f"{begun.path.name} is of a run that has taken {taken} steps, and --steps is {steps}: {more}"
    return f"this run is finished: {begun.path.name} has all its {taken} steps; {more}"


def _of_steps(word: str, before: str) -> bool:
    """Return whether a word is the flag --steps or its value, by the word before it."""
    return word == "--steps" or word.startswith("--steps=") or before == "--steps"


def begins_again(begun: VerifiedCheckpoint, words: Sequence[str]) -> str:
    """Say how a run that was to go on from a checkpoint, and ended before its first step, begins: as it did.

    Args:
        begun: The checkpoint.
        words: The words of the command.
    """
    return f"resume with: raypar train {shlex.join(words)} (after step {begun.manifest.step})"


def begins_anew(run: Run, *, is_new: bool) -> str:
    """Say how a run that has saved nothing begins anew; "" if the same command does it.

    Args:
        run: The run.
        is_new: Whether the command chooses a new folder each time.
    """
    if is_new or run.folder is None or not holds_run(absolute(run.folder)):
        return ""
    return "the same command with --overwrite begins anew"


def how_to_go_on(run: Run, *, is_new: bool) -> str:
    """Say how a run that has ended badly goes on: from its newest checkpoint, if it has one, else anew.

    The arguments are those of ``begins_anew``.
    """
    from raypar.checkpoint.find import newest_listed

    if run.folder is None:
        return "nothing was saved: give --folder, and --save-every, to keep checkpoints"
    if (saved := newest_listed(absolute(run.folder) / CHECKPOINTS)) is None:
        keeps = "" if run.save_every else ": give --save-every to keep checkpoints"
        return f"nothing was saved{keeps}; {begins_anew(run, is_new=is_new) or 'the same command begins anew'}"
    is_code = isinstance(run.schedule, str) and names_code(run.schedule)
    code = f" --schedule {shlex.quote(str(run.schedule))}" if is_code else ""
    return f"resume with: raypar train --resume {shlex.quote(run.folder)}{code} (after step {saved.step})"
