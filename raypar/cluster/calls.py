"""Waiting for actors: until all have answered, or until one can't, and then for whose fault it was."""

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

_GRACE = 2.0  # seconds for the others to notice a fault by themselves, before they are told
_LOOK = 0.5  # seconds between two looks at actors that have not answered


class Calls:
    """Calls to a job's actors, by rank. ``timeout`` is how long an actor may stay in one action, in seconds."""

    def __init__(self, handles: Sequence[Any], world: World, timeout: float) -> None:
        self._handles, self._world, self._timeout = handles, world, timeout

    def all(self, method: str, *args: object, what: str) -> list[Any]:
        """Call a method of every actor at once; the answers by rank. Raises what ``gather`` raises."""
        return self.gather(self.submit(method, *args), what)

    def submit(self, method: str, *args: object) -> list[Any]:
        """Call a method of every actor at once and wait for none: the calls, for ``gather``."""
        return [getattr(handle, method).remote(*args) for handle in self._handles]

    def beside(self, method: str, *args: object) -> list[Any]:
        """Call a method of every actor that works beside its steps and wait for none: the calls, for ``outcomes``."""
        return [getattr(handle, method).options(concurrency_group="disk").remote(*args) for handle in self._handles]

    def outcomes(self, refs: Sequence[Any], given_up: threading.Event) -> list[Any]:
        """The answers to calls, one to each rank; in place of one that failed, its exception.

        They may take as long as they want while their actors are alive. When one has been silent for the run's timeout,
        or ``given_up`` is set, the answers that are not in are StalledErrors.
        """
        pending, heard, silent = list(refs), dict.fromkeys(refs, time.monotonic()), False
        while pending and ray.is_initialized() and not given_up.is_set() and not silent:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=_LOOK)
            ranks = [rank for rank, ref in enumerate(refs) if ref in pending]
            answered = self._ping(ranks)
            heard |= {refs[rank]: time.monotonic() for rank in ranks if rank in answered}
            silent = any(time.monotonic() - heard[ref] > self._timeout for ref in pending)
        late = StalledError("it did not answer" if silent else "it had not answered when the job ended")
        if not ray.is_initialized():  # any question would start another one
            return [late] * len(refs)
        return [late if ref in pending else _cause(error) if (error := _error(ref)) else ray.get(ref) for ref in refs]

    def one(self, rank: int, method: str, *args: object, what: str) -> Any:
        """Call a method of one actor; its answer. Raises what ``gather`` raises."""
        return self.some([rank], method, *args, what=what)[0]

    def some(self, ranks: Sequence[int], method: str, *args: object, what: str) -> list[Any]:
        """Call a method of these actors at once; their answers in the same order. Raises what ``gather`` raises."""
        return self.gather([getattr(self._handles[rank], method).remote(*args) for rank in ranks], what, ranks)

    def drop(self, refs: Sequence[Any]) -> None:
        """Wait for calls whose answers do not matter, errors included."""
        ray.wait(list(refs), num_returns=len(refs), timeout=self._timeout)

    def gather(self, refs: Sequence[Any], what: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """The answers to calls, one for each of ``ranks`` (None: call i was to rank i), in their order.

        Raises JobError naming the actor at fault, or NonFiniteError; ``what`` was going on.
        """
        try:
            return list(ray.get(list(refs), timeout=_LOOK))
        except GetTimeoutError:
            pass  # a long step, or a fault: look after the actors while they work
        except (RayActorError, RayTaskError):
            pass  # which error came first says little: hear the others too
        owners = list(range(len(refs))) if ranks is None else list(ranks)
        pending = list(dict.fromkeys(refs))
        watch = _Watch(time.monotonic())
        failed_at: float | None = None
        asked: dict[int, Any] = {}  # by rank: those that had no answer when the first one failed, whether they live
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
        """Tell every actor to break off what it waits for; one that does not answer is not waited for."""
        refs = [handle.abort.options(concurrency_group="ctl").remote() for handle in self._handles]
        ray.wait(refs, num_returns=len(refs), timeout=_LOOK)

    def _ask(self, ranks: Iterable[int]) -> dict[int, Any]:
        """Questions to actors that they answer whatever their steps do, by rank; one that has died does, too."""
        return {rank: self._handles[rank].progress.options(concurrency_group="ctl").remote() for rank in sorted(ranks)}

    def _ping(self, ranks: Sequence[int]) -> set[int]:
        """Which of these actors answer."""
        refs = self._ask(ranks)
        answered, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=_LOOK) if refs else ([], [])
        return {rank for rank, ref in refs.items() if ref in answered}

    def _look(self, watch: _Watch, ranks: set[int], what: str) -> None:
        """Raise StalledError if one of the actors has been in the same action for too long, or does not answer."""
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
            # an actor that waits for another one finds out by itself, and says for whom it waited
            if now - since > self._timeout + _GRACE:
                doing = f"in action {progress.action}" if progress and progress.action else "silent"
                raise StalledError(f"actor {self._world.label(rank)} was {doing} for {now - since:.0f} s during {what}")

    def _verdict(self, errors: dict[int, Exception], silent: Sequence[int], what: str) -> Exception:
        """Of several errors the one that the others follow from; ``silent`` actors have no error, and no answer."""
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
    def __init__(self, start: float) -> None:
        self.start = start
        self.seen: dict[int, tuple[tuple[int, int], float]] = {}


def _error(ref: Any) -> Exception | None:
    try:
        ray.get(ref)
    except (RayActorError, RayTaskError) as error:
        return error
    return None


def _cause(error: Exception) -> Exception:
    return error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
