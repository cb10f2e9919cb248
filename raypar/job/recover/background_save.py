"""Save a job's checkpoints: its actors copy their state between two steps and write it while the next steps run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from raypar.actors.checkpoint.reports import ShardReport, written_of
from raypar.actors.errors import CheckpointError, first_line
from raypar.actors.specs.run import Run
from raypar.checkpoint.base import base_weights_fingerprint
from raypar.checkpoint.manifest import Manifest, manifest_of
from raypar.checkpoint.save import Save
from raypar.cluster.calls.calls import Calls
from raypar.config.toml import plain_of
from raypar.paths import CHECKPOINTS, absolute, checkpoints

log = logging.getLogger(__name__)
_GRACE = 10.0  # seconds that a save gets to complete after the run has failed


class Saver:
    """Saves checkpoints of a run, one at a time: the next one waits for the one under way.

    Args:
        run: The run.
        calls: Calls to its actors.

    Attributes:
        newest: The newest checkpoint that was saved; None before the first.
        lost: Why the checkpoint at the end of the run was not saved; None if it was, or if it is not due yet.
    """

    def __init__(self, run: Run, calls: Calls) -> None:
        self.newest: Path | None = None
        self.lost: BaseException | None = None
        self._run, self._calls = run, calls
        self._thread = ThreadPoolExecutor(1, "raypar-save")
        self._under_way: Future[Path] | None = None
        self._asked: Future[None] | None = None
        self._given_up = threading.Event()
        self._prepared = False

    def move(self, calls: Calls, run: Run | None = None) -> None:
        """Save from other actors from now on, in another layout, perhaps as another run. Nothing may be under way."""
        self._calls, self._prepared, self._run = calls, False, run or self._run

    def due(self, step: int) -> bool:
        """Return whether the run asks for a checkpoint after ``step`` steps."""
        every = self._run.save_every
        return self._run.folder is not None and (step == self._run.steps or (every > 0 and step % every == 0))

    def next_due(self, step: int, last: int) -> int:
        """Return the number of steps after which the next checkpoint is due.

        Args:
            step: Number of steps taken so far.
            last: The result if no checkpoint is due before.
        """
        every, ends = self._run.save_every, [last]
        if self._run.folder is not None:
            ends += [self._run.steps, *([(step // every + 1) * every] if every else [])]
        return min(end for end in ends if end > step)

    def save(self, folder: Path, step: int, keep_last: int | None) -> Path:
        """Save a checkpoint now and wait until it is committed.

        Args:
            folder: Folder of checkpoints.
            step: Number of steps taken so far.
            keep_last: Number of checkpoints to keep, this one included; None keeps all.

        Returns:
            The checkpoint's path.

        Raises:
            CheckpointError: The checkpoint can't be written.
        """
        saved = self._begin(folder, step, keep_last, beside=False).result()
        if step == self._run.steps:
            self.lost = None
        return saved

    def copy_weights(self, folder: Path, step: int) -> Path:
        """Save a checkpoint of the weights alone, which no run can go on from, and return its path.

        Args:
            folder: Folder of checkpoints.
            step: Number of steps taken so far.

        Raises:
            CheckpointError: It can't be written.
        """
        newest = self.newest
        try:
            return self._begin(folder, step, None, beside=False, weights_only=True).result()
        finally:
            self.newest = newest

    def after(self, step: int, *, is_last: bool = False) -> None:
        """Save the checkpoint that is due after ``step`` steps, if any, while training continues.

        A failure is logged as a warning. Wait only for the last checkpoint of the run.

        Args:
            step: Number of steps taken so far.
            is_last: Whether the run ends here, before its last step.
        """
        if self._run.folder is None:
            return
        if not self._prepared:  # not earlier: before the first step the optimizer has no state to make room for
            self._calls.submit("make_room")
            self._prepared = True
        folder, last = absolute(self._run.folder) / CHECKPOINTS, is_last or step == self._run.steps
        if not self.due(step) and not last:
            return
        try:
            if folder.is_symlink():
                raise CheckpointError(
                    [f"{str(folder)!r} is a symbolic link, and raypar writes through none: remove it"]
                )
            saving = self._begin(folder, step, self._run.keep_last, beside=not last)
        except CheckpointError as error:
            self._warn(step, error)
            self.lost = error if last else None
            return
        saving.add_done_callback(partial(self._warn_of, step))
        if last:
            self.settle()
            self._thread.submit(int).result()  # by then the thread has logged what failed
            self.lost = saving.exception()

    def again(self, step: int) -> None:
        """Save the checkpoint that is due after ``step`` steps, unless it is there: it was lost with an actor."""
        if self._run.folder is not None and step and self.due(step):
            folder = absolute(self._run.folder) / CHECKPOINTS
            if not folder.is_dir() or all(saved != step for saved, _ in checkpoints(folder)):
                self.after(step)

    def save_last(self, save: Callable[[], Path | None]) -> None:
        """Save a checkpoint of a run that can't go on. What fails is logged: the run ends for another reason.

        Args:
            save: Saves it and returns its path; None if there is nothing to save.
        """
        try:
            saved = save()
        except Exception as error:  # Ray raises many types
            log.warning("what its actors have in memory was not saved: %s", first_line(error))
            return
        if saved is not None:
            self.newest = saved
            log.info("saved as %s, from memory", saved.name)

    def ask(self, methods: Sequence[str], then: Callable[..., None]) -> None:
        """Call methods of the probes of all actors now and pass their answers on in the saving thread.

        Args:
            methods: Names of the methods.
            then: Called with one list of answers, by rank, for each method. Not called if an actor fails to answer.
        """
        asked = [self._calls.submit("probe", method) for method in methods]
        self._asked = self._thread.submit(self._answered, asked, then)

    def close(self, *, hurried: bool = False) -> None:
        """Wait for the save under way and end the saving thread.

        Args:
            hurried: Whether to give the save up if it takes more than a few seconds, because the run has failed.
        """
        try:
            self.settle(_GRACE if hurried else None)
        finally:
            self._given_up.set()
            self._thread.shutdown()

    def settle(self, seconds: float | None = None) -> None:
        """Wait until nothing is under way, at most for ``seconds``."""
        under_way: list[Future[Any]] = [future for future in (self._under_way, self._asked) if future is not None]
        wait(under_way, seconds)

    def _begin(
        self, folder: Path, step: int, keep_last: int | None, *, beside: bool, weights_only: bool = False
    ) -> Future[Path]:
        """Start a save: the actors copy their state and write it, and the saving thread commits it.

        Args:
            folder: Folder of checkpoints.
            step: Number of steps taken so far.
            keep_last: Number of checkpoints to keep; None keeps all.
            beside: Whether steps run meanwhile, so that the writing uses only idle cores.
            weights_only: Whether to leave out what a run goes on from beside the weights.
        """
        if self._under_way is not None:
            wait([self._under_way])
        save = Save(absolute(folder), step)
        try:
            self._calls.submit("stage", weights_only)
            refs = self._calls.submit("write", str(save.path), beside, group="disk")
            self._under_way = self._thread.submit(self._finish, save, refs, keep_last)
        except BaseException:
            save.abort()
            raise
        return self._under_way

    def _finish(self, save: Save, refs: Sequence[Any], keep_last: int | None) -> Path:
        with save:
            outcomes = self._calls.outcomes(refs, self._given_up)
            faults = [
                f"actor {self._calls.world.label(rank)}: {fault}"
                for rank, outcome in enumerate(outcomes)
                if isinstance(outcome, Exception)
                for fault in (outcome.faults if isinstance(outcome, CheckpointError) else [first_line(outcome)])
            ]
            CheckpointError.raise_if(faults)
            reports = [outcome for outcome in outcomes if outcome is not None]
            self.newest = save.commit(run_manifest(self._run, save.step, reports), keep_last)
            return self.newest

    def _warn_of(self, step: int, saved: Future[Path]) -> None:
        with suppress(BaseException):  # no error of a save ends the training
            if (error := saved.exception()) is not None:
                self._warn(step, error)

    def _warn(self, step: int, error: BaseException) -> None:
        """Log that a checkpoint is missing. Whether the run goes on is another matter: the actors may have died."""
        before = "" if self.newest is None else f"; the newest is {self.newest.name}"
        lines = "\n" if "\n" in str(error) else " "
        log.warning("no checkpoint of step %d was saved%s:%s%s", step, before, lines, error)

    def _answered(self, asked: Sequence[Sequence[Any]], then: Callable[..., None]) -> None:
        answers = [self._calls.outcomes(refs, self._given_up) for refs in asked]
        if not any(isinstance(answer, Exception) for of_all in answers for answer in of_all):
            then(*answers)


def run_manifest(run: Run, step: int, reports: Iterable[ShardReport]) -> Manifest:
    """Return the manifest of a checkpoint of a run.

    Args:
        run: The run.
        step: Number of steps taken.
        reports: What actors have written.
    """
    return manifest_of(step, run.seed, plain_of(run), written_of(reports), base_weights_fingerprint(run))
