"""Saving a job: its actors copy their state between two steps, and write it beside the next ones."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from raypar.actors.errors import CheckpointError
from raypar.actors.mesh.world import World
from raypar.actors.specs.run import Run
from raypar.checkpoint.manifest import manifest_of
from raypar.checkpoint.save import Save
from raypar.cluster.calls import Calls
from raypar.config.toml import plain_of
from raypar.paths import CHECKPOINTS, absolute

log = logging.getLogger(__name__)
_GRACE = 10.0  # seconds


class Saver:
    """Saves checkpoints of a run, one at a time: the next one waits for the one under way."""

    def __init__(self, run: Run, calls: Calls, world: World) -> None:
        self._run, self._calls, self._world = run, calls, world
        self._thread = ThreadPoolExecutor(1, "raypar-save")
        self._under_way: Future[Path] | None = None
        self._asked: Future[None] | None = None
        self._given_up = threading.Event()
        self._prepared = False

    def due(self, step: int) -> bool:
        """Whether the run asks for a checkpoint after so many steps."""
        every = self._run.save_every
        return self._run.folder is not None and (step == self._run.steps or (every > 0 and step % every == 0))

    def next_due(self, step: int, last: int) -> int:
        """The next step count at which a checkpoint is due, ``last`` if none is due before."""
        every, ends = self._run.save_every, [last]
        if self._run.folder is not None:
            ends += [self._run.steps, *([(step // every + 1) * every] if every else [])]
        return min(end for end in ends if end > step)

    def save(self, folder: Path, step: int, keep_last: int | None) -> Path:
        """Save the state after ``step`` steps, now; returns the committed checkpoint. Raises CheckpointError."""
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}: keep 1 at least, or None for all")
        return self._begin(folder, step, keep_last, beside=False).result()

    def after(self, step: int) -> None:
        """Save what is due after ``step`` steps while training goes on; a failure is a warning.

        The last one of a run is waited for.
        """
        if self._run.folder is None:
            return
        if not self._prepared:  # before the first step an optimizer has kept nothing yet
            self._calls.submit("make_room")
            self._prepared = True
        if not self.due(step):
            return
        folder, last = absolute(self._run.folder) / CHECKPOINTS, step == self._run.steps
        try:
            self._begin(folder, step, self._run.keep_last, beside=not last).add_done_callback(_warn)
        except CheckpointError as error:
            _tell(error)
        if last:
            self._wait()

    def ask(self, methods: Sequence[str], then: Callable[..., None]) -> None:
        """Ask all actors now, and call ``then`` in the thread that saves with the answers to each of the methods.

        It is not called if an actor can't answer.
        """
        asked = [self._calls.submit(method) for method in methods]
        self._asked = self._thread.submit(self._answered, asked, then)

    def close(self, *, hurried: bool = False) -> None:
        """Finish what is under way; a run that has failed is ``hurried``, and gives it up if it takes long."""
        try:
            self._wait(_GRACE if hurried else None)
        finally:
            self._given_up.set()
            self._thread.shutdown()

    def _wait(self, seconds: float | None = None) -> None:
        """Wait until nothing is under way, so many seconds at most."""
        under_way: list[Future[Any]] = [future for future in (self._under_way, self._asked) if future is not None]
        wait(under_way, seconds)

    def _begin(self, folder: Path, step: int, keep_last: int | None, *, beside: bool) -> Future[Path]:
        """``beside`` says whether steps go on meanwhile, which it should take little from."""
        if self._under_way is not None:
            wait([self._under_way])
        save = Save(absolute(folder), step)
        try:
            self._calls.submit("stage")
            refs = self._calls.beside("write", str(save.path), beside)
            self._under_way = self._thread.submit(self._finish, save, refs, keep_last)
        except BaseException:
            save.abort()
            raise
        return self._under_way

    def _finish(self, save: Save, refs: Sequence[Any], keep_last: int | None) -> Path:
        with save:
            outcomes = self._calls.outcomes(refs, self._given_up)
            faults = [
                f"actor {self._world.label(rank)}: {fault}"
                for rank, outcome in enumerate(outcomes)
                if isinstance(outcome, Exception)
                for fault in (outcome.faults if isinstance(outcome, CheckpointError) else [str(outcome)])
            ]
            if faults:
                raise CheckpointError(faults)
            shards = [outcome for outcome in outcomes if outcome is not None]
            manifest = manifest_of(save.step, self._run.seed, plain_of(self._run), shards)
            return save.commit(manifest, keep_last)

    def _answered(self, asked: Sequence[Sequence[Any]], then: Callable[..., None]) -> None:
        answers = [self._calls.outcomes(refs, self._given_up) for refs in asked]
        if not any(isinstance(answer, Exception) for of_all in answers for answer in of_all):
            then(*answers)


def _warn(saved: Future[Path]) -> None:
    with suppress(BaseException):  # what the thread did not expect is no reason to end the training either
        if (error := saved.exception()) is not None:
            _tell(error)


def _tell(error: BaseException) -> None:
    log.warning("no checkpoint was saved, the training goes on:\n%s", error)
