"""Calls to actors: wait until all have answered or one fails, and find which actor is at fault."""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from raypar.actors.errors import ActionError, NonFiniteError, RouterError
from raypar.actors.specs.results import Progress
from raypar.cluster.deadline import SILENT, Deadline
from raypar.cluster.post_mortem import death_of
from raypar.cluster.witnesses import Witnesses
from raypar.errors import ActorDiedError, JobError, StalledError
from raypar.schedules.action import Action

_GRACE = 2.0  # seconds after a failure in which the other actors can report it themselves
_LOOK = 0.5  # seconds between two checks of actors that have not answered


class Named(Protocol):
    """Who knows the names of actors, as the ranks of a run do."""

    def label(self, rank: int) -> str:
        """Name an actor in messages."""


class Calls:
    """Calls to a job's actors, by rank.

    Args:
        handles: The Ray actor handles, by rank.
        world: The ranks, for the actors' names in messages.
        timeout: How long an actor may stay in one action, in seconds.
        replaces: Whether another actor takes the place of one that is given up.
        witnesses: The actors' processes: when one dies, they say of what.

    Attributes:
        deadline: How long an actor may stay in one action, or be silent.
    """

    def __init__(
        self,
        handles: Sequence[Any],
        world: Named,
        timeout: float,
        *,
        replaces: bool = False,
        witnesses: Witnesses | None = None,
    ) -> None:
        self._handles, self._world, self._timeout = list(handles), world, timeout
        self.deadline = Deadline(timeout, replaces=replaces)
        self._witnesses = witnesses or Witnesses()

    @property
    def handles(self) -> Sequence[Any]:
        """The Ray actor handles, by rank."""
        return self._handles

    def replace(self, rank: int, handle: Any) -> None:
        """Call another actor from now on, in the place of one that has failed."""
        self._handles[rank] = handle

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
            answered = self.heard(ranks)
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

    def answers(
        self, ranks: Iterable[int], method: str, *args: object, seconds: float, group: str = ""
    ) -> dict[int, Any]:
        """Call a method of some actors at once, and give those up that fail or do not answer in time.

        Args:
            ranks: The actors' ranks.
            method: The name of the method.
            *args: Its arguments.
            seconds: How long to wait.
            group: The concurrency group in which the actors run it; "" for the one of their steps.

        Returns:
            The answers by rank, of those who answered.
        """
        called = {rank: getattr(self._handles[rank], method) for rank in ranks}
        refs = {
            rank: (call.options(concurrency_group=group) if group else call).remote(*args)
            for rank, call in called.items()
        }
        ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=seconds) if refs else ([], [])
        return {rank: ray.get(ref) for rank, ref in refs.items() if ref in ready and _error(ref) is None}

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
        except RayError:
            pass  # the first error may be a consequence of another one: wait for the others too
        owners = list(range(len(refs))) if ranks is None else list(ranks)
        pending = list(dict.fromkeys(refs))
        watch = _Watch(owners)
        failed_at: float | None = None
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=_LOOK)
            late = {owners[i] for i, ref in enumerate(refs) if ref in pending}
            if failed_at is None and any(_error(ref) for ref in ready):
                failed_at = time.monotonic()
            self._listen(watch, late)
            if failed_at is None:
                self._demand_progress(watch, late, what)
            elif time.monotonic() - failed_at > _GRACE or all(watch.silence(rank) > SILENT for rank in late):
                break
        errors = {owners[i]: error for i, ref in enumerate(refs) if ref not in pending and (error := _error(ref))}
        if errors or pending:
            errors |= self._died_idle(errors, late)
            raise self._verdict(errors, [rank for rank in sorted(late) if watch.silence(rank) > SILENT], what)
        return list(ray.get(list(refs)))

    def first(self, refs: Sequence[Any], what: str, ranks: Sequence[int]) -> tuple[list[Any], bool]:
        """Wait until one of some calls is done.

        Args:
            refs: The object refs of the calls.
            what: What is going on, for messages.
            ranks: The rank that each call went to.

        Returns:
            The object refs of all calls that are done, and whether one of them has failed.

        Raises:
            StalledError: An actor does not answer, or has been in one action for too long.
        """
        watch, late = _Watch(ranks), set(ranks)
        while not (done := ray.wait(list(refs), num_returns=1, timeout=_LOOK)[0]):
            self._listen(watch, late)
            self._demand_progress(watch, late, what)
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        return done, any(_error(ref) is not None for ref in done)

    def abort(self) -> None:
        """Tell every actor to stop whatever it waits for. Waits only briefly for confirmation."""
        refs = [handle.abort.options(concurrency_group="ctl").remote() for handle in self._handles]
        ray.wait(refs, num_returns=len(refs), timeout=_LOOK)

    def _ask(self, ranks: Iterable[int]) -> dict[int, Any]:
        """Ask actors for their progress, which they answer even during a step; return the refs by rank."""
        return {rank: self._handles[rank].progress.options(concurrency_group="ctl").remote() for rank in sorted(ranks)}

    def heard(self, ranks: Sequence[int], seconds: float = _LOOK) -> set[int]:
        """Return of which of these actors something is heard in so many seconds: an answer, or that they have died."""
        refs, end, answered = self._ask(ranks), time.monotonic() + seconds, list[Any]()
        while len(answered) < len(refs) and time.monotonic() < end:  # in short waits: Ray ignores Ctrl-C while waiting
            left = max(0.0, min(_LOOK, end - time.monotonic()))
            answered, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=left)
        return {rank for rank, ref in refs.items() if ref in answered}

    def _listen(self, watch: _Watch, ranks: set[int]) -> None:
        """Note what actors have answered to the last question for their progress, and ask those again."""
        now = time.monotonic()
        for rank in ranks:
            ref = watch.asked.get(rank)
            if ref is not None:
                if not ray.wait([ref], timeout=0)[0]:
                    continue
                watch.hear(rank, ray.get(ref) if _error(ref) is None else None, now)
            if now - watch.asked_at.get(rank, 0.0) > _LOOK / 2:
                watch.asked |= self._ask([rank])
                watch.asked_at[rank] = now

    def _demand_progress(self, watch: _Watch, ranks: set[int], what: str) -> None:
        """Raise StalledError if an actor has been in one action for too long or does not answer."""
        now = time.monotonic()
        for rank in ranks:
            if watch.silence(rank) > self.deadline.silence:
                doing, since = "silent", watch.silence(rank)
            elif (since := now - watch.moved[rank]) > self.deadline.action:
                doing = f"in action {watch.action[rank]}" if watch.action.get(rank) else "silent"
            else:
                continue
            raise StalledError(f"actor {self._world.label(rank)} was {doing} for {since:.0f} s during {what}")

    def _died_idle(self, errors: Mapping[int, Exception], late: Container[int]) -> dict[int, Exception]:
        """Return the errors of actors that died when none of their calls was under way, as between two tasks.

        They are asked for if all that failed, failed for want of a peer.

        Args:
            errors: The errors of calls, by rank.
            late: The ranks whose calls are under way.
        """
        causes = [_cause(error) for error in errors.values()]
        if not causes or not all(isinstance(cause, ActionError) and cause.secondary for cause in causes):
            return {}
        asked = self._ask(rank for rank in range(len(self._handles)) if rank not in errors and rank not in late)
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=_GRACE) if asked else ([], [])
        found = {rank: error for rank, ref in asked.items() if ref in ready and (error := _error(ref)) is not None}
        return {rank: error for rank, error in found.items() if _is_death(error)}

    def _verdict(self, errors: dict[int, Exception], silent: Sequence[int], what: str) -> Exception:
        """Choose the error that caused the others. ``silent`` ranks have neither an error nor an answer."""
        seen = [str(cause) for other in errors.values() if (cause := _cause(other)) is not other]
        after = f"; seen from the others: {seen[0]}" if seen else ""
        for rank, error in errors.items():
            if _is_death(error):
                text = f"actor {self._world.label(rank)} died during {what}{after}"
                return ActorDiedError(text, death_of(error, rank, self._witnesses), rank)
        causes = [_cause(error) for error in errors.values()]
        if silent and all(isinstance(cause, ActionError) and cause.secondary for cause in causes):
            names = " and ".join(self._world.label(rank) for rank in silent)
            return StalledError(f"actor {names} gives no answer, stopped or out of reach, during {what}{after}")
        for kind in (RouterError, NonFiniteError):  # the first names a router where it began
            for cause in causes:
                if isinstance(cause, kind):
                    return cause
        actions = [cause for cause in causes if isinstance(cause, ActionError)]
        for action in sorted(actions, key=lambda action: action.secondary):
            return JobError(f"{action} (during {what})" + (f"\n{action.trace}" if action.trace else ""))
        if causes:
            return JobError(f"{what} failed: {type(causes[0]).__name__}: {causes[0]}")
        return JobError(f"{what} failed: an actor did not answer")


class _Watch:
    """What actors that work have answered to questions for their progress.

    Args:
        ranks: The actors.

    Attributes:
        asked: By rank, the latest question.
        asked_at: By rank, when it was asked, in seconds of time.monotonic.
        moved: By rank, when the actor was first seen in the action that it is in, or was idle.
        action: By rank, that action; None between two actions.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.asked: dict[int, Any] = {}
        self.asked_at: dict[int, float] = {}
        self.moved = dict.fromkeys(ranks, time.monotonic())
        self.action: dict[int, Action | None] = {}
        self._heard = dict(self.moved)
        self._done: dict[int, tuple[int, int]] = {}

    def hear(self, rank: int, progress: Progress | None, now: float) -> None:
        """Note an answer, or None for an error, at a time of time.monotonic."""
        self._heard[rank] = now
        if progress is None:
            return
        done = progress.step, progress.done
        if progress.idle or self._done.get(rank) != done:
            self._done[rank], self.moved[rank] = done, now
        self.action[rank] = progress.action

    def silence(self, rank: int) -> float:
        """Return for how many seconds an actor has answered nothing."""
        return time.monotonic() - self._heard[rank]


def _error(ref: Any) -> Exception | None:
    """Return the exception of a finished call, or None if it succeeded."""
    try:
        ray.get(ref)
    except RayError as error:
        return error
    return None


def _is_death(error: Exception) -> TypeGuard[RayError]:
    """Return whether a call failed because the actor's process or node is gone."""
    return isinstance(error, RayError) and not isinstance(error, RayTaskError)


def _cause(error: Exception) -> Exception:
    """Return the exception that the actor raised, without Ray's wrapper."""
    return error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
