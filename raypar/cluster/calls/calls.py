"""Calls to actors: wait until all have answered or one fails, and find which actor is at fault."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from raypar.actors.errors import ActionError, NonFiniteError, RouterError
from raypar.actors.specs.results import StepResult
from raypar.cluster.calls.answers import LOOK, Answer, Answers, ProgressWatch
from raypar.cluster.calls.deadline import SILENT, Deadline
from raypar.cluster.control_server import ControlServer
from raypar.cluster.deaths.post_mortem import death_of
from raypar.cluster.deaths.process_monitors import ProcessMonitors
from raypar.cluster.nodes.probes import remote_cause
from raypar.errors import ActorDiedError, JobError, RayLostError, StalledError

log = logging.getLogger(__name__)
_GRACE = 2.0  # seconds after a failure in which the other actors can report it themselves
_WITHOUT_SERVER = 40.0  # seconds that a step may still take without Ray's control server; after 60 s Ray ends all
_SHORT = 0.5  # seconds for which answers are awaited without progress queries


class Named(Protocol):
    """An object with the names of actors, such as the ranks of a run."""

    def label(self, rank: int) -> str:
        """Name an actor in messages."""


class Calls:
    """Calls to a job's actors, by rank.

    Args:
        handles: The Ray actor handles, by rank.
        world: The names of the actors, for messages.
        timeout: Most seconds that an actor may stay in one action.
        replaces: Whether an actor that is given up is replaced.
        monitors: The monitors of the actors' processes, which report how a process ended.
        server: Ray's control server; if it is lost, calls do not wait for long.

    Attributes:
        world: The names of the actors.
        deadline: The limits of the time in one action, and of silence.
    """

    def __init__(
        self,
        handles: Sequence[Any],
        world: Named,
        timeout: float,
        *,
        replaces: bool = False,
        monitors: ProcessMonitors | None = None,
        server: ControlServer | None = None,
    ) -> None:
        self._handles, self.world, self._timeout = list(handles), world, timeout
        self.deadline = Deadline(timeout, replaces=replaces)
        self._monitors, self._server = monitors or ProcessMonitors(), server or ControlServer()
        self._lost_at = math.inf

    @property
    def handles(self) -> Sequence[Any]:
        """The Ray actor handles, by rank."""
        return self._handles

    def replace(self, rank: int, handle: Any) -> None:
        """Call another actor from now on, instead of one that has failed."""
        self._handles[rank] = handle

    def all(self, method: str, *args: object, what: str) -> list[Any]:
        """Call a method of every actor at once, and wait for the answers.

        Args:
            method: The name of the method.
            *args: Its arguments.
            what: The operation's name in messages, for example "step 3", counted from 1.

        Returns:
            The answers by rank.

        Raises:
            Exception: The errors of ``gather``.
        """
        return self.gather(self.submit(method, *args), what)

    def each(
        self, method: str, arguments: Sequence[tuple[object, ...]], *, what: str, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Call a method of actors, each with different arguments, and wait for the answers.

        Args:
            method: The name of the method.
            arguments: The arguments for each actor, in the order of ``ranks``.
            what: The operation's name in messages.
            ranks: The actors' ranks; None: all of them.

        Returns:
            The answers, in the order of ``ranks``. Raises the errors of ``gather``.
        """
        calls = zip(range(len(self._handles)) if ranks is None else ranks, arguments, strict=True)
        return self.gather([ref for rank, own in calls for ref in self.submit(method, *own, ranks=[rank])], what, ranks)

    def submit(self, method: str, *args: object, ranks: Collection[int] | None = None, group: str = "") -> list[Any]:
        """Call a method of actors without waiting.

        Args:
            method: The name of the method.
            *args: Its arguments.
            ranks: The actors' ranks; None: all of them.
            group: The concurrency group in which the actors run it; "" for the one of their steps.

        Returns:
            The object refs in the order of ``ranks``, for ``gather`` or ``outcomes``.
        """
        handles = self._handles if ranks is None else [self._handles[rank] for rank in ranks]
        methods = [getattr(handle, method) for handle in handles]
        return [(one.options(concurrency_group=group) if group else one).remote(*args) for one in methods]

    def shared(self, value: object) -> Any:
        """Return an argument for many calls that stands for a value, which is serialized once and sent once a node."""
        return ray.put(value)

    def outcomes(self, refs: Sequence[Any], given_up: threading.Event) -> list[Any]:
        """Wait for calls without a time limit, while their actors are alive.

        Args:
            refs: One object ref for each rank, by rank.
            given_up: Set by another thread to stop waiting.

        Returns:
            The answers by rank. A failed call has its exception instead of an answer. When an actor has been silent
            for the timeout, or ``given_up`` is set, the calls without an answer have a StalledError.
        """
        waiting, taken, silent = self.waiting(zip(refs, range(len(refs)), strict=True)), dict[Any, Answer](), False
        while waiting.answers.late and ray.is_initialized() and not given_up.is_set() and not silent:
            answers, has_looked = waiting.take()
            taken |= {answer.ref: answer for answer in answers}
            silent = has_looked and any(waiting.watch.silence(rank) > self._timeout for rank in waiting.answers.late)
        late = StalledError("it did not answer" if silent else "it had not answered when the job ended")
        if not ray.is_initialized():
            return [late] * len(refs)
        return [_outcome(taken[ref]) if ref in taken else late for ref in refs]

    def some(self, ranks: Sequence[int], method: str, *args: object, what: str) -> list[Any]:
        """Call a method of some actors at once, and wait for the answers.

        Args:
            ranks: The actors' ranks.
            method: The name of the method.
            *args: Its arguments.
            what: The operation's name in messages.

        Returns:
            The answers, in the order of ``ranks``.

        Raises:
            Exception: The errors of ``gather``.
        """
        return self.gather(self.submit(method, *args, ranks=ranks), what, ranks)

    def answers(
        self, ranks: Collection[int], method: str, *args: object, seconds: float, group: str = ""
    ) -> dict[int, Any]:
        """Call a method of some actors at once, and ignore those that fail or do not answer in time.

        Args:
            ranks: The actors' ranks.
            method: The name of the method.
            *args: Its arguments.
            seconds: Most seconds to wait after the call or the previous answer.
            group: The concurrency group in which the actors run it; "" for the one of their steps.

        Returns:
            The answers by rank, of the actors that answered.
        """
        refs = self.submit(method, *args, ranks=ranks, group=group)
        return self.answers_to(dict(zip(ranks, refs, strict=True)), seconds)

    def answers_to(self, refs: Mapping[int, Any], seconds: float) -> dict[int, Any]:
        """Wait for calls to some actors as ``answers`` does; return the answers by rank, of the actors that answered.

        Args:
            refs: The object ref of each actor's call, by rank.
            seconds: Most seconds to wait from now or from the previous answer.
        """
        answers = Answers((ref, rank) for rank, ref in refs.items()).take_within(seconds)
        return {rank: answer.value for rank, answer in answers.items() if answer.error is None}

    def drop(self, refs: Sequence[Any]) -> None:
        """Wait for calls whose results do not matter, errors included, up to the timeout."""
        ray.wait(list(refs), num_returns=len(refs), timeout=self._timeout)

    def gather(self, refs: Sequence[Any], what: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """Wait for the answers to calls.

        Args:
            refs: The object refs of the calls.
            what: The operation's name in messages.
            ranks: The rank of each call, or None if call i went to rank i.

        Returns:
            The answers, in the order of ``refs``.

        Raises:
            JobError: If a call failed or an actor does not answer. The text names the actor at fault. The type is
                ActorDiedError if an actor died, StalledError if one does not get on.
            NonFiniteError: If an actor raised it.
        """
        owners = range(len(refs)) if ranks is None else ranks
        try:
            return self._heard(list(ray.get(list(refs), timeout=_SHORT)), owners)
        except GetTimeoutError:
            pass  # a long step or a fault: watch the actors while they work
        except RayError:
            pass  # the first error may be a consequence of another one: wait for the others too
        waiting, taken = self.waiting(zip(refs, owners, strict=True)), dict[Any, Answer]()
        failed_at: float | None = None
        while waiting.answers.late:
            answers, has_looked = waiting.take(what if failed_at is None else None)
            taken |= {answer.ref: answer for answer in answers}
            if failed_at is None and any(answer.error for answer in answers):
                failed_at = time.monotonic()
            if failed_at is not None and (
                time.monotonic() - failed_at > _GRACE
                or (has_looked and all(waiting.watch.silence(rank) > SILENT for rank in waiting.answers.late))
            ):
                break
        errors = {taken[ref].rank: error for ref in refs if ref in taken and (error := taken[ref].error) is not None}
        if errors or waiting.answers.late:
            errors |= self._died_idle(errors, waiting.answers.late)
            silent = [rank for rank in sorted(waiting.answers.late) if waiting.watch.silence(rank) > SILENT]
            living = [rank for rank in owners if rank not in silent and not _is_death(errors.get(rank))]
            for rank, lines in sorted(self.answers(living, "printed", seconds=_SHORT, group="ctl").items()):
                self._pass_on(rank, lines)
            raise self._verdict(errors, silent, what)
        return self._heard([taken[ref].value for ref in refs], owners)

    def _heard(self, answers: list[Any], ranks: Sequence[int]) -> list[Any]:
        """Print what the user's code has printed on the actors, log their warnings, and return the answers."""
        warned = dict[str, list[int]]()
        for rank, answer in zip(ranks, answers, strict=True):
            if isinstance(answer, StepResult):
                if answer.printed:
                    self._pass_on(rank, answer.printed)
                for line in answer.warned:
                    warned.setdefault(line, []).append(rank)
        for line, ranks_of_line in warned.items():
            first, others = self.world.label(ranks_of_line[0]), len({*ranks_of_line}) - 1
            log.warning("%s%s: %s", first, f" and {others:,} more" if others else "", line)
        return answers

    def _pass_on(self, rank: int, lines: Sequence[str]) -> None:
        """Print lines of an actor, each with its name in front."""
        for line in lines:
            sys.stdout.write(f"{self.world.label(rank)}: {line}\n")
        sys.stdout.flush()

    def waiting(self, refs: Iterable[tuple[Any, int]] = ()) -> Waiting:
        """Await calls; further ones may be added.

        Args:
            refs: The object refs of calls, with the ranks that were called.
        """
        return Waiting(Answers(refs), ProgressWatch(self._query), self._demand_progress)

    def abort(self) -> None:
        """Make every actor stop waiting. Waits only briefly for confirmation."""
        refs = self.submit("abort", group="ctl")
        ray.wait(refs, num_returns=len(refs), timeout=_SHORT)

    def _query(self, rank: int) -> Any:
        """Query the progress of an actor, which answers even during a step; return the object ref of the call."""
        return self.submit("progress", ranks=[rank], group="ctl")[0]

    def _demand_progress(self, watch: ProgressWatch, ranks: Iterable[int], what: str) -> None:
        """Raise StalledError if an actor has been in one action for too long or does not answer.

        Raises RayLostError if Ray's control server is gone for longer than a step should take.
        """
        if why := self._server.why_lost():
            if self._lost_at == math.inf:
                self._lost_at = time.monotonic()
                log.warning(
                    "%s: the run is saved and ends after %s, if that ends within %g s", why, what, _WITHOUT_SERVER
                )
            if time.monotonic() - self._lost_at > _WITHOUT_SERVER:
                raise RayLostError(f"{why}, and {what} goes on for longer than Ray does")
        for rank in ranks:
            stay, action = watch.stay(rank)
            if (silence := watch.silence(rank)) > self.deadline.silence:
                doing, since = "silent", silence
            elif stay > self.deadline.action:
                doing, since = f"in action {action}" if action else "silent", stay
            else:
                continue
            raise StalledError(f"actor {self.world.label(rank)} was {doing} for {since:.0f} s during {what}")

    def _died_idle(self, errors: Mapping[int, Exception], late: Container[int]) -> dict[int, Exception]:
        """Return the errors of actors that died while none of their calls was under way, as between two tasks.

        They are queried only if every failed call failed because of a missing peer.

        Args:
            errors: The errors of calls, by rank.
            late: The ranks whose calls are under way.
        """
        causes = [remote_cause(error) for error in errors.values()]
        if not causes or not all(isinstance(cause, ActionError) and cause.secondary for cause in causes):
            return {}
        ranks = range(len(self._handles))
        queries = Answers((self._query(rank), rank) for rank in ranks if rank not in errors and rank not in late)
        found = queries.take_within(_GRACE)
        return {rank: answer.error for rank, answer in found.items() if answer.error and _is_death(answer.error)}

    def _verdict(self, errors: dict[int, Exception], silent: Sequence[int], what: str) -> Exception:
        """Choose the error that caused the others. ``silent`` ranks have neither an error nor an answer."""
        seen = [str(cause) for other in errors.values() if (cause := remote_cause(other)) is not other]
        after = f"; seen from the others: {seen[0]}" if seen else ""
        for rank, error in errors.items():
            if _is_death(error):
                text = f"actor {self.world.label(rank)} died during {what}{after}"
                return ActorDiedError(text, death_of(error, rank, self._monitors), rank)
        causes = [remote_cause(error) for error in errors.values()]
        if silent and all(isinstance(cause, ActionError) and cause.secondary for cause in causes):
            names = " and ".join(self.world.label(rank) for rank in silent)
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


@dataclass
class Waiting:
    """Waits for calls to a job's actors, and watches those that are late.

    Attributes:
        answers: The awaited answers.
        watch: Queries late actors.
        demand: Raises StalledError if one of them does not get on. Its arguments are the watch, the late ranks, and the
            operation's name.
    """

    answers: Answers
    watch: ProgressWatch
    demand: Callable[[ProgressWatch, Iterable[int], str], None]

    def expect(self, ref: Any, rank: int) -> None:
        """Await one more call to a rank."""
        self.answers.expect(ref, rank)

    def take(self, what: str | None = None) -> tuple[list[Answer], bool]:
        """Wait briefly for answers.

        Args:
            what: The operation's name in messages; None: an actor that does not get on is no error.

        Returns:
            The answers that have arrived, and whether the late actors were queried.

        Raises:
            StalledError: An actor does not answer, or has been in one action for too long.
        """
        found = self.answers.take(LOOK)
        has_looked = self.watch.listen(self.answers.late)
        if has_looked and what is not None:
            self.demand(self.watch, self.answers.late, what)
        return found, has_looked

    def next(self, what: str) -> list[Answer]:
        """Wait until at least one call is done; return the answers of all done calls. Raises the errors of ``take``."""
        while not (found := self.take(what)[0]):
            pass
        return found


def _outcome(answer: Answer) -> Any:
    """Return the result of a call, or the exception that its actor has raised; of an actor that died a JobError."""
    if _is_death(answer.error):
        return JobError("it died")  # Ray's text says it in other words than all other messages
    return answer.value if answer.error is None else remote_cause(answer.error)


def _is_death(error: Exception | None) -> TypeGuard[RayError]:
    """Return whether a call failed because the actor's process or node is gone."""
    return isinstance(error, RayError) and not isinstance(error, RayTaskError)
