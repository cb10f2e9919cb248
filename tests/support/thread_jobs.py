"""Without Ray: a Stepper, or what verify asks of a Job, over the actors of a Team, each in a thread of its own."""

from __future__ import annotations

from concurrent.futures import Future, wait
from contextlib import contextmanager
from copy import deepcopy
from types import SimpleNamespace

from raypar.actors.models.skeleton import Skeleton
from raypar.cluster.calls.answers import Answers, ProgressWatch
from raypar.cluster.calls.calls import Calls, Waiting
from raypar.config.schedule import programs_of
from raypar.job.job import Job
from raypar.job.look.inspection import Inspection
from raypar.job.start.loaded_run import LoadedRun
from raypar.job.stepping.stepper import Stepper
from raypar.job.steps.executors import executor_of
from raypar.reporting.report import report_of
from tests.support.refs import Ref
from tests.support.team import Team
from tests.support.threads import threads


class Handle:
    """As Ray's: ``handle.method.remote(...)``, one call after the other; what comes back is a copy."""

    def __init__(self, actor):
        self._actor, self._thread = actor, threads(1)

    def close(self):
        self._thread.shutdown()

    def __getattr__(self, name):
        return Method(getattr(self._actor, name), self._thread.submit)


class Method:
    """As Ray's: it waits for what it is given as futures, and has a name."""

    def __init__(self, method, submit):
        self._method, self._submit = method, submit

    def options(self, **_):
        return self

    def remote(self, *args):
        def call():
            there = [arg.result(0) if isinstance(arg, Future) else arg for arg in args]
            return deepcopy(self._method(*there))

        ref = Ref()
        self._submit(_answer, ref, call)
        return ref


def _answer(ref, call):
    try:
        ref.set_result(call())
    except BaseException as error:
        ref.set_exception(error)


class ThreadCalls(Calls):
    """Calls to threads, whose answers are waited for without Ray."""

    def waiting(self, refs=()):
        return Waiting(Answers(refs), ProgressWatch(lambda rank: Ref()), demand=lambda *_: None)

    def gather(self, refs, what, ranks=None):
        wait(refs, 90)
        return [ref.result(0) for ref in refs]


class Hands:
    """Steps of a team, one after the other."""

    def __init__(self, team):
        self.team, self.next_step = team, 0
        self.handles = [Handle(actor) for actor in team.all]
        self.calls = ThreadCalls(self.handles, team.world, 90.0)
        self.schedule = team.programs["train"]

    def close(self):
        for handle in self.handles:
            handle.close()

    def lowered(self, schedule):
        run = self.team.run
        reduces = self.team.world.reduces
        return programs_of(schedule, run.mesh.pp, run.microbatches, run.chunks, reduce_grad=reduces)["train"]

    def stepper(self):
        run, team = self.team.run, self.team
        loaded = LoadedRun(run, self.schedule, team.world, self.calls, Skeleton(run.model, run.seed))
        return Stepper(loaded, "cpu", self.next_step, guard=lambda call: call(), commit=self.commit)

    def commit(self, results, seconds):
        report = report_of(self.next_step, seconds, results, self.team.world)
        self.next_step += 1
        return report


class Lasting:
    """The life of actors that no fault ends."""

    failure, epoch = None, 0

    @contextmanager
    def guarded(self, *, patient=True):
        yield

    def demand_open(self):
        pass


class TeamJob:
    """A Job as far as verify asks for one: of any run, ``reset`` as often as wanted."""

    def __init__(self, run):
        self._hands = None
        self.reset(run)

    def reset(self, run):
        self.close()
        self.run, self._hands = run, Hands(Team.of(run))
        self.schedule, team = self._hands.schedule, self._hands.team
        hands, skeleton = self._hands, Skeleton(run.model, run.seed)
        loaded = LoadedRun(run, hands.schedule, team.world, hands.calls, skeleton)
        self._executor = executor_of(loaded)
        holds = [actor.holds() for actor in team.all]
        loop = SimpleNamespace(loaded=loaded, holds=holds, read=lambda call: call())
        self._inspection = Inspection(Lasting(), loop, "cpu")

    @property
    def __class__(self):
        return Job  # for checks of arguments

    def __getattr__(self, name):
        return getattr(self._inspection, name)

    @property
    def next_step(self):
        return self._hands.next_step

    def step(self):
        results = self._executor.results(self._executor.begin(self.next_step, 0, 0), "a step")
        return self._hands.commit(results, 1.0)

    def stream(self, first, length):
        """The actors' results of so many steps of an asynchronous schedule."""
        return self._executor.results(self._executor.begin(first, 0, 0, length), "a stream")

    def stepper(self):
        return self._hands.stepper()

    def close(self):
        if self._hands is not None:
            self._hands.close()
