"""Steps by hand without Ray: a Stepper over the actors of a Team, each in a thread of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

from raypar.program import programs_of
from raypar.report import report_of
from raypar.stepping.recorder import Recorder
from raypar.stepping.stepper import Stepper


class Handle:
    """As Ray's: ``handle.method.remote(...)``, one call after the other."""

    def __init__(self, actor):
        self._actor, self._thread = actor, ThreadPoolExecutor(1)

    def __getattr__(self, name):
        method, submit = getattr(self._actor, name), self._thread.submit
        return type("Method", (), {"remote": staticmethod(lambda *args: submit(method, *args))})


class Calls:
    def __init__(self, handles):
        self._handles = handles

    def all(self, method, *args, what):
        return self.gather([getattr(handle, method).remote(*args) for handle in self._handles], what)

    def one(self, rank, method, *args, what):
        return self.gather([getattr(self._handles[rank], method).remote(*args)], what)[0]

    def gather(self, refs, what, ranks=None):
        wait(refs, 30)
        return [ref.result(0) for ref in refs]


class Hands:
    """Steps of a team, one after the other."""

    def __init__(self, team):
        self.team, self.next_step = team, 0
        self._handles = [Handle(actor) for actor in team.all]
        self._schedule = self.lowered(team.run.schedule)

    def lowered(self, schedule):
        run = self.team.run
        reduces = self.team.world.reduces
        return programs_of(schedule, run.mesh.pp, run.microbatches, run.chunks, reduce_grad=reduces)["train"]

    def stepper(self):
        calls, world = Calls(self._handles), self.team.world
        return Stepper(
            self._schedule,
            self.next_step,
            world,
            self._handles,
            calls,
            guard=lambda call: call(),
            commit=self._commit,
            lowered=self.lowered,
            recorder=Recorder(self.team.run, "cpu", world, calls),
        )

    def _commit(self, results, seconds):
        report = report_of(self.next_step, 0.0, seconds, results, self.team.world)
        self.next_step += 1
        return report
