"""Load runs on a job's actors: the first one, another one instead, and the same one in another layout."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from raypar.actors.specs.injected_fault import InjectedFault
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind
from raypar.actors.specs.worlds import world_of
from raypar.checkpoint.find import VerifiedCheckpoint
from raypar.errors import RelayoutLostError
from raypar.job.layout.other_layout import other_layout
from raypar.job.layout.rebalance import Loads, rebalanced
from raypar.job.recover.active_layout import ActiveLayout
from raypar.job.recover.failures import Failure
from raypar.job.recover.relayout import Relayout, demand_actors, relaid
from raypar.job.recover.restarts import Restarts
from raypar.job.start.before_launch import replacement
from raypar.job.start.lifetime import Lifetime
from raypar.job.start.loaded_run import LoadedRun, loaded_on
from raypar.job.start.resume import Prepared
from raypar.job.start.run_folders import put_aside, settled
from raypar.job.steps.training_loop import TrainingLoop
from raypar.reporting.record import Record
from raypar.reporting.summary import log_plan

log = logging.getLogger(__name__)


class RunSwitch:
    """Loads runs on a job's actors.

    Args:
        lifetime: The life of the actors.
        device: Device that they compute on.
        name: The job's name.
        chaos: Faults that are injected on purpose.
        checked: The first run, which ``start`` makes the actors build.
        record: Its record.

    Attributes:
        starter: Starts runs, and starts them again.
        loop: Takes the steps of the run.
    """

    def __init__(
        self,
        lifetime: Lifetime,
        device: DeviceKind,
        name: str,
        chaos: Sequence[InjectedFault],
        checked: Prepared,
        record: Record,
    ) -> None:
        self._lifetime, self._device, self._name = lifetime, device, name
        self.starter = Restarts(
            lifetime, name, ActiveLayout(lifetime, name, device, chaos, lambda *moved: self.loop.move(*moved))
        )
        self.loop = TrainingLoop(lifetime, device, self._loaded(checked), record, self.starter)

    def start(self, checked: Prepared) -> None:
        """Make the actors build the run that the loop has, and load a checkpoint if there is one."""
        holds = self.starter.start(self.loop.loaded, checked.programs, checked.found)
        self.loop.begin(holds, checked.taken, self._name)

    def replace(
        self, run: Run, resume: str | PathLike[str] | VerifiedCheckpoint | None, *, keep_idle: bool = False
    ) -> None:
        """Replace the run by another one on the same actors, as ``Job.reset`` does."""
        self.loop.demand_ready()
        with self.loop.unlocked():
            checked = replacement(run, resume, self.loop.loaded.run, self._device)
        actors, size = self._lifetime.actors, world_of(checked.run).size
        demand_actors(actors, size, self._name, "reset")
        run, calls = settled(checked.run), self.loop.loaded.calls
        if self.loop.loaded.run.max_failures:  # one that has died since the last step is replaced as in a step
            self.loop.between_steps(lambda: calls.all("progress", what="the end of the run before"), "a reset")
        self.loop.leave(run.folder)
        with self._lifetime.guarded():
            self._exchange(checked._replace(run=run), Record(run))
        if not keep_idle:
            actors.shrink(size + run.spares)

    def relayout(self, to: Run | None, changes: Mapping[str, Any]) -> Relayout:
        """Go on with the run in another layout, as ``Job.relayout`` does."""
        self.loop.demand_ready()
        active, actors = self.starter.active, self._lifetime.actors
        whole, skeleton = active.layouts.whole, self.loop.loaded.skeleton
        layout = other_layout(whole, to, changes, skeleton, self._device)
        if layout.run == whole.run and active.layout is whole:
            return Relayout(self.loop.next_step)  # nothing moves
        found = self.loop.between_steps(lambda: relaid(active, actors, layout, self.loop.next_step), "a relayout")
        if isinstance(found, Failure):
            raise RelayoutLostError(f"the relayout is lost ({found.reason}), and {found}: call relayout again")
        log.info("%s", found)
        return found

    def rebalance(self, loads: Loads | None) -> Mapping[str, str]:
        """Move experts with their states between actors, as ``Job.rebalance`` does."""
        run = rebalanced(self.loop.loaded.run, loads, self.loop.last)
        with put_aside(run) as folder:
            self.replace(run, self.loop.save(folder, None))
        return run.expert_order

    def _exchange(self, checked: Prepared, record: Record) -> None:
        """Replace the actors' run by another one."""
        self.loop.finish()
        try:
            self.loop.loaded.calls.all("leave", what="the end of the run before")
            loaded = self._loaded(checked)
            log_plan(checked.run, loaded.schedule, loaded.skeleton, checked.taken)
            self.loop.exchange(loaded, record)
        except BaseException:
            record.close()
            raise
        self.start(checked)

    def _loaded(self, checked: Prepared) -> LoadedRun:
        return loaded_on(self._lifetime, checked.run, checked.programs, checked.skeleton)
