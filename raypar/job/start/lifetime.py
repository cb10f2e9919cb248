"""The life of a job's actors: a call to them completes, or its failure ends the job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from raypar.actors.errors import NonFiniteError
from raypar.actors.mesh.world import World
from raypar.cluster.calls.calls import Calls
from raypar.cluster.control_server import ControlServer
from raypar.cluster.deaths.process_monitors import ProcessMonitors
from raypar.cluster.interrupts import CtrlC, patience
from raypar.cluster.lifecycle.actors import Actors
from raypar.errors import TO_GO_ON, CallError, JobError

log = logging.getLogger(__name__)

HEARD = 2.5  # seconds in which an actor that lives answers: a GIL may be held for 2 s


class Lifetime:
    """A job's actors, until a failure or the job's ``close`` ends them.

    Args:
        actors: The actors.
        close: Closes the job. A failure calls it, and it calls ``end``.
        saved: Returns the newest checkpoint in the run's folder that the job has saved; None before the first.

    Attributes:
        failure: Why the job is over; None while it is alive.
        epoch: Number of steps so far that were refused for non-finite gradients. Actors refuse calls of an earlier
            epoch.
        witnesses: The actors' processes.
        server: Ray's control server.
    """

    def __init__(self, actors: Actors, close: Callable[[], None], saved: Callable[[], Path | None]) -> None:
        self.failure: str | None = None
        self.epoch = 0
        self.witnesses, self.server = ProcessMonitors(), ControlServer()
        self._actors: Actors | None = actors
        self._calls: Calls | None = None
        self._close, self._saved, self._has_failed = close, saved, False

    @property
    def actors(self) -> Actors:
        """The actors. Raises JobError if the job is over."""
        self.demand_open()
        assert self._actors is not None
        return self._actors

    def calls_on(self, world: World, timeout: float, *, replaces: bool = False) -> Calls:
        """Return Calls to the actors of a world. From now on, a failure aborts these.

        Args:
            world: The ranks; rank i is actor i.
            timeout: How long an actor may stay in one action, in seconds.
            replaces: Whether another actor takes the place of one that is given up.

        Raises:
            JobError: The job is over.
        """
        handles = self.actors.handles[: world.size]
        self._calls = Calls(handles, world, timeout, replaces=replaces, monitors=self.witnesses, server=self.server)
        return self._calls

    def demand_open(self) -> None:
        """Raise JobError if the job is over."""
        if self.failure is None and (self._actors is None or not self._actors.reachable()):
            self.failure = "the Ray that its actors lived in was shut down"
        if self.failure is not None:
            raise JobError(f"this job is over ({self.failure}): {self._how_to_go_on()}")

    @contextmanager
    def guarded(self, *, patient: bool = True) -> Iterator[None]:
        """Call the actors in this context. A failure in it ends the job, so that nothing is left waiting or running.

        The context calls the actors and records their answers. Both belong into one context: if it were interrupted in
        between, driver and actors would be in different steps.

        Args:
            patient: Whether a first Ctrl-C or SIGTERM waits for the end of the context; a second one ends the job. If
                not, the first one ends it.

        Raises:
            JobError: The job is over, or a failure in the context has ended it.
            NonFiniteError: The gradients are not finite, and no actor has updated its weights. The job can continue.
            CallError: A call that changes no weight failed on actors that live. The job can continue.
            KeyboardInterrupt: Ctrl-C was pressed. If it waited for the context the job can continue, else it is over.
            SystemExit: SIGTERM has come to a command of raypar, as for Ctrl-C.
        """
        self.demand_open()
        ctrl_c = CtrlC()
        try:
            with patience("the calls they have") if patient else nullcontext(ctrl_c) as ctrl_c:
                yield
        except (NonFiniteError, CallError) as error:  # no weight was changed: the job can continue
            self.epoch += isinstance(error, NonFiniteError)
            ctrl_c.heed()
            raise
        except (KeyboardInterrupt, SystemExit, JobError) as error:
            if self.failure is None:  # otherwise a nested guard has ended the job
                self._fail(error)
            raise
        ctrl_c.heed()

    def end(self, let_go: Callable[[bool], None]) -> None:
        """End the actors, and Ray if the launch started it. A second call does nothing.

        Args:
            let_go: Ends what the run has started besides its actors. Called first, with whether the job has failed.
        """
        if self._actors is None:
            return
        (actors, self._actors), failure = (self._actors, None), self.failure
        self.failure = failure or "the job was closed"
        try:
            let_go(failure is not None)
        finally:
            self.witnesses.close()
            actors.end(is_lost=not self.server.answers(), has_failed=self._has_failed)

    def _fail(self, error: KeyboardInterrupt | SystemExit | JobError) -> None:
        if isinstance(error, JobError):
            self.failure, self._has_failed = str(error).splitlines()[0], True
            log.error("%s", self.failure)  # at once: to end the actors takes seconds
            if self._calls is not None:
                self._calls.abort()
        else:  # the actors still complete their step, so the driver must not repeat it
            self.failure = "it was interrupted while its actors worked"
        self._close()
        self.note(error)  # when a save has ended

    def note(self, error: BaseException) -> None:
        """Note on an error how the run goes on in another job, if no note says it yet."""
        if not any(note.startswith(TO_GO_ON) for note in getattr(error, "__notes__", [])):
            error.add_note(f"{TO_GO_ON}{self._how_to_go_on()}.")

    def _how_to_go_on(self) -> str:
        """Say how the run goes on in another job: from its newest checkpoint, if it has saved one."""
        if (saved := self._saved()) is None:
            return "launch the run again"
        return f"launch the run again with resume={str(saved.parents[1])!r} ({saved.name})"
