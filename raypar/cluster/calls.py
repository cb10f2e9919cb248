"""Calls to actors: wait until all have answered or one fails, and find which actor is at fault."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from raypar.actors.errors import ActionError, NonFiniteError
from raypar.actors.mesh.world import World
from raypar.errors import ActorDiedError, JobError, StalledError

_GRACE = 2.0  # seconds after a failure in which the other actors can report it themselves
_LOOK = 0.5  # seconds between two checks of actors that have not answered


class Calls:
    """Calls to a job's actors, by rank.

    Args:
        handles: The Ray actor handles, by rank.
        world: The ranks, for the actors' names in messages.
        timeout: How long an actor may stay in one action, in seconds.
    """

    def __init__(self, handles: Sequence[Any], world: World, timeout: float) -> None:
        self._handles, self._world, self._timeout = handles, world, timeout

    def all(self, method: str, *args: object, what: str) -> list[Any]:
        """Call a method of every actor at once, and wait for the answers.

        Args:
            method: The name of the method.
            *args: Its arguments.
            what: What is going on, for messages, for example "step 3", counted from 1.

        Returns:
            The answers by rank.

        Raises:
            Exception: What ``gather`` raises.
        """
        return self.gather(self.submit(method, *args), what)

    def submit(self, method: str, *args: object) -> list[Any]:
        """Call a method of every actor without waiting; returns the object refs by rank, for ``gather``."""
        return [getattr(handle, method).remote(*args) for handle in self._handles]

    def beside(self, method: str, *args: object) -> list[Any]:
        """Call a method in the actors' "disk" concurrency group, which runs beside their steps, without waiting.

        Returns the object refs by rank, for ``outcomes``.
        """
        return [getattr(handle, method).options(concurrency_group="disk").remote(*args) for handle in self._handles]

    def outcomes(self, refs: Sequence[Any], given_up: threading.Event) -> list[Any]:
        """Wait for calls that may take as long as they need while their actors are alive.

        Args:
            refs: One object ref for each rank, by rank.
            given_up: Set by another thread to stop waiting.

        Returns:
            The answers by rank. A failed call has its exception in place of an answer. When an actor has been silent
            for the timeout, or ``given_up`` is set, the calls without an answer have a StalledError.
        """
        pending, heard, silent = list(refs), dict.fromkeys(refs, time.monotonic()), False
        while pending and ray.is_initialized() and not given_up.is_set() and not silent:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=_LOOK)
            ranks = [rank for rank, ref in enumerate(refs) if ref in pending]
            answered = self._ping(ranks)
            heard |= {refs[rank]: time.monotonic() for rank in ranks if rank in answered}
            silent = any(time.monotonic() - heard[ref] > self._timeout for ref in pending)
        late = StalledError("it did not answer" if silent else "it had not answered when the job ended")
        if not ray.is_initialized():  # any call to Ray would start a new one
            return [late] * len(refs)
        return [late if ref in pending else _cause(error) if (error := _error(ref)) else ray.get(ref) for ref in refs]

    def one(self, rank: int, method: str, *args: object, what: str) -> Any:
        """Call a method of one actor and return its answer. Raises what ``gather`` raises."""
        return self.some([rank], method, *args, what=what)[0]

    def some(self, ranks: Sequence[int], method: str, *args: object, what: str) -> list[Any]:
        """Call a method of some actors at once, and wait for the answers.

        Args:
            ranks: The actors' ranks.
            method: The name of the method.
            *args: Its arguments.
            what: What is going on, for messages.

        Returns:
            The answers, in the order of ``ranks``.

        Raises:
            Exception: What ``gather`` raises.
        """
        return self.gather([getattr(self._handles[rank], method).remote(*args) for rank in ranks], what, ranks)

    def drop(self, refs: Sequence[Any]) -> None:
        """Wait for calls whose results do not matter, errors included, up to the timeout."""
        ray.wait(list(refs), num_returns=len(refs), timeout=self._timeout)

    def gather(self, refs: Sequence[Any], what: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """Wait for the answers to calls.

        Args:
            refs: The object refs of the calls.
            what: What is going on, for messages.
            ranks: The rank that each call went to, or None if call i went to rank i.

        Returns:
            The answers, in the order of ``refs``.

        Raises:
            JobError: If a call failed or an actor does not answer. The text names the actor at fault; the type is
                ActorDiedError or StalledError if that is what happened.
            NonFiniteError: If an actor raised it.
        """
        try:
            return list(ray.get(list(refs), timeout=_LOOK))
        except GetTimeoutError:
            pass  # a long step or a fault: watch the actors while they work
        except (RayActorError, RayTaskError):
            pass  # the first error may be a consequence of another one: wait for the others too
        owners = list(range(len(refs))) if ranks is None else list(ranks)
        pending = list(dict.fromkeys(refs))
        watch = _Watch(time.monotonic())
        failed_at: float | None = None
        asked: dict[int, Any] = {}  # by rank: progress calls to actors that had not answered at the first failure
        while pending:
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=_LOOK)
            late = {owners[i] for i, ref in enumerate(refs) if ref in pending}
            if pending and failed_at is None and any(_error(ref) for ref in ready):
                failed_at, asked = time.monotonic(), self._ask(late)
            if not pending:
                break
            if failed_at is not None and time.monotonic() - failed_at > _GRACE:
                break
            if failed_at is None:
                self._look(watch, late, what)
        errors = {owners[i]: error for i, ref in enumerate(refs) if ref not in pending and (error := _error(ref))}
        if errors or pending:
            silent = [rank for rank, ref in asked.items() if rank in late and not ray.wait([ref], timeout=0)[0]]
            raise self._verdict(errors, silent, what)
        return list(ray.get(list(refs)))

    def abort(self) -> None:
        """Tell every actor to stop whatever it waits for. Waits only briefly for confirmation."""
        refs = [handle.abort.options(concurrency_group="ctl").remote() for handle in self._handles]
        ray.wait(refs, num_returns=len(refs), timeout=_LOOK)

    def _ask(self, ranks: Iterable[int]) -> dict[int, Any]:
        """Ask actors for their progress, which they answer even during a step; return the refs by rank."""
        return {rank: self._handles[rank].progress.options(concurrency_group="ctl").remote() for rank in sorted(ranks)}

    def _ping(self, ranks: Sequence[int]) -> set[int]:
        """Return which of these actors answer."""
        refs = self._ask(ranks)
        answered, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=_LOOK) if refs else ([], [])
        return {rank for rank, ref in refs.items() if ref in answered}

    def _look(self, watch: _Watch, ranks: set[int], what: str) -> None:
        """Raise StalledError if an actor has been in one action for too long or does not answer."""
        refs = self._ask(ranks)
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=_LOOK)
        now = time.monotonic()
        for rank, ref in refs.items():
            done, _ = ray.wait([ref], timeout=0)
            progress = ray.get(ref) if done and _error(ref) is None else None
            if progress is not None and (
                progress.idle or watch.seen.get(rank, (None, 0.0))[0] != (progress.step, progress.done)
            ):
                watch.seen[rank] = ((progress.step, progress.done), now)
            since = watch.seen.get(rank, (None, watch.start))[1]
            # an actor that waits for another one times out by itself, and names that one: _GRACE lets it come first
            if now - since > self._timeout + _GRACE:
                doing = f"in action {progress.action}" if progress and progress.action else "silent"
                raise StalledError(f"actor {self._world.label(rank)} was {doing} for {now - since:.0f} s during {what}")

    def _verdict(self, errors: dict[int, Exception], silent: Sequence[int], what: str) -> Exception:
        """Choose the error that caused the others. ``silent`` ranks have neither an error nor an answer."""
        seen = [str(cause) for other in errors.values() if (cause := _cause(other)) is not other]
        after = f"; seen from the others: {seen[0]}" if seen else ""
        for rank, error in errors.items():
            if isinstance(error, RayActorError):
                return ActorDiedError(f"actor {self._world.label(rank)} died during {what}{after}")
        causes = [_cause(error) for error in errors.values()]
        if silent and all(isinstance(cause, ActionError) and cause.secondary for cause in causes):
            names = " and ".join(self._world.label(rank) for rank in silent)
            return StalledError(f"actor {names} gives no answer, stopped or out of reach, during {what}{after}")
        for cause in causes:
            if isinstance(cause, NonFiniteError):
                return cause
        actions = [cause for cause in causes if isinstance(cause, ActionError)]
        for action in sorted(actions, key=lambda action: action.secondary):
            return JobError(f"{action} (during {what})" + (f"\n{action.trace}" if action.trace else ""))
        if causes:
            return JobError(f"{what} failed: {type(causes[0]).__name__}: {causes[0]}")
        return JobError(f"{what} failed: an actor did not answer")


class _Watch:
    """When each actor was last seen making progress.

    Attributes:
        start: When the watch began, in seconds of time.monotonic.
        seen: By rank, the last ``(step, number of actions done)`` and when it was first seen.
    """

    def __init__(self, start: float) -> None:
        self.start = start
        self.seen: dict[int, tuple[tuple[int, int], float]] = {}


def _error(ref: Any) -> Exception | None:
    """Return the exception of a finished call, or None if it succeeded."""
    try:
        ray.get(ref)
    except (RayActorError, RayTaskError) as error:
        return error
    return None


def _cause(error: Exception) -> Exception:
    """Return the exception that the actor raised, without Ray's wrapper."""
    return error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
