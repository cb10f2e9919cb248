"""The prediction of a training step: the schedule performed on paper, and where the costs of its actions come from.

Two sources of costs exist. Before a run there are only FLOPs and bytes; after some steps there are measured durations.
They disagree, because FLOPs know neither caches nor the optimizer, so a prediction is
shown with its source.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version

from raypar.actors.machine.host_cores import num_cores
from raypar.actors.machine.this_machine import computes_here, device_kind
from raypar.actors.models.partition import split_layers, transformer_costs
from raypar.actors.specs.model import Transformer
from raypar.actors.specs.run import Run
from raypar.errors import ConfigError
from raypar.planner.assumed_rates import block_seconds, rates_of
from raypar.planner.calibrated.calibrated_costs import calibrated_costs
from raypar.planner.calibrated.calibration import Calibration
from raypar.planner.calibrated.calibration_file import VARIABLE, default_path, found_calibration
from raypar.planner.cost_model import seconds_of_run
from raypar.planner.sizes.sized_run import SizedRun
from raypar.schedules.action import COMPUTE, Op
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.measured_costs import costs_of
from raypar.schedules.simulation.simulate import Costs, outcome, simulate
from raypar.schedules.timeline import Timeline

log = logging.getLogger(__name__)

FROM_FLOPS = "from FLOPs and bytes"
IN_SLOTS = "in slots"  # of the user's own layers no FLOPs are known: every stage takes as long
FROM_CALIBRATION = "from the calibration"
FROM_STEPS = "from the measured costs of steps before"
FROM_ITSELF = "from the measured costs of the step itself"

_LEAVES_OUT = {
    FROM_FLOPS: "FLOPs and bytes leave out the optimizer, and other programs on these cores",
    FROM_CALIBRATION: "a calibration leaves out how far messages hide, and other programs on these cores",
    IN_SLOTS: "slots take all stages to be as long, and leave out messages, the optimizer, and other programs",
    FROM_STEPS: "medians leave out waits that the schedule does not ask for",
    FROM_ITSELF: "medians leave out waits that the schedule does not ask for",
}


@dataclass(frozen=True)
class Prediction:
    """A predicted training step.

    Attributes:
        timeline: The simulated step, in seconds; IN_SLOTS in forwards of a stage.
        source: Where the costs come from: FROM_FLOPS, FROM_CALIBRATION, IN_SLOTS, FROM_STEPS or FROM_ITSELF.
        alone: Makespan without the messages between replicas, as far as they are known, in the unit of the timeline.
        between: Seconds between two steps, if they are known.
        process: Bytes of an actor's process without a run, if they are known.
        least: Seconds that a step takes at least, because small blocks take longer than their FLOPs.
    """

    timeline: Timeline
    source: str
    alone: float
    between: float = 0.0
    process: int | None = None
    least: float = 0.0

    def most(self, op: Op) -> float:
        """Return how long the actions of an op in a step last together on the rank where they last longest."""
        seconds = [0.0] * self.timeline.num_ranks
        for event in self.timeline.events:
            if event.action.op is op:
                seconds[event.rank] += event.end - event.start
        return max(seconds) / self.timeline.schedule.num_steps

    @property
    def simulated(self) -> float:
        """Seconds of a step as simulated, however small its blocks are; of steps that overlap, on average."""
        return self.timeline.makespan / self.timeline.schedule.num_steps + self.between

    @property
    def step(self) -> float:
        """Seconds of a step: as simulated, and ``least`` at the least."""
        return max(self.simulated, self.least)

    @property
    def from_what(self) -> str:
        """Where the seconds of a step come from, in words."""
        is_least = self.least and self.step == self.least
        return f"{self.source}, and at least 1 ms for each block and microbatch" if is_least else self.source

    @property
    def bubble(self) -> str:
        """The bubble in words, "5.7% predicted from FLOPs and bytes"."""
        return f"{self.timeline.bubble:.1%} predicted {self.source}"

    @property
    def leaves_out(self) -> str:
        """Why a measured bubble differs, in a sentence."""
        return _LEAVES_OUT[self.source]


def before_run(sized: SizedRun) -> Prediction:
    """Predict a step of a run before it starts: from the calibration, if there is one that fits the run, else as
    ``from_flops`` does.

    A calibration that can't be read is logged, and not used. The argument is that of ``from_flops``.
    """
    return predictor_of(sized.run)(sized)


def predictor_of(run: Run) -> Callable[[SizedRun], Prediction]:
    """Return what predicts a step before a run, and steps of the same run with other microbatches or schedules.

    Args:
        run: The run, as ``before_run`` has it.
    """
    try:
        calibration = found_calibration()
    except ConfigError as error:
        log.warning("predicted without a calibration: %s", "; ".join(error.faults))
        calibration = None
    if calibration is None or calibration_misfits(run, calibration):
        return from_flops
    return partial(from_calibration, calibration=calibration)


def why_uncalibrated(run: Run) -> str:
    """Return why a run is predicted without a calibration, and how to get one that fits; "" if it has one."""
    if unmeasured := [*_not_measured(run)]:
        return "; ".join(unmeasured)
    try:
        calibration = found_calibration()
    except ConfigError as error:
        return "; ".join(error.faults)
    if calibration is None:
        where = default_path()
        if where is None:
            return f"{VARIABLE} is empty, so that no calibration is used: unset it, or name a file of raypar calibrate"
        return f"there is no calibration in {where}: raypar calibrate measures this machine or cluster in a minute"
    return "; ".join(calibration_misfits(run, calibration))


def better_calibration(run: Run, prediction: Prediction) -> str:
    """Return how to get a better prediction: by a calibration, or a new one; "" if there is no way."""
    if prediction.source != FROM_CALIBRATION:
        return why_uncalibrated(run)
    known = found_calibration()
    return "" if known is None else cautions(known)


def cautions(calibration: Calibration) -> str:
    """Return why a calibration may be wrong here: a busy machine, or another version of torch; "" if neither."""
    found = [f"it was {calibration.origin.busy}"] if calibration.origin.busy else []
    measured, here = calibration.origin.versions.get("torch"), version("torch")
    if measured is not None and measured != here:
        found.append(f"it is of torch {measured}, and here is {here}")
    return f"{', and '.join(found)}: raypar calibrate measures anew" if found else ""


def calibration_misfits(run: Run, calibration: Calibration) -> list[str]:
    """Return why a calibration does not fit a run: the device, the dtype, the threads or the cores differ."""
    found, again = [*_not_measured(run)], "raypar calibrate measures anew"
    if calibration.device != (kind := device_kind(run.device)):
        found.append(f"the calibration is of device {calibration.device!r}, and the run is for {kind!r}: {again}")
    if calibration.threads != run.num_threads:
        text = f"the calibration is of threads={calibration.threads} an actor, and the run has {run.num_threads}"
        found.append(f"{text}: threads={calibration.threads} is predicted in seconds")
    if computes_here(run.device) and calibration.origin.cores != (cores := num_cores()):
        found.append(f"the calibration is of {calibration.origin.cores} cores, and here are {cores}: {again}")
    return found


def _not_measured(run: Run) -> Iterator[str]:
    """Yield the settings of a run that no calibration measures."""
    if not isinstance(run.model, Transformer):
        yield "a calibration knows a GPT and a Llama, and not layers of your own"
    if run.precision.is_half:
        yield f"a calibration is of fp32, and the run computes in {run.precision.compute}"
    if run.data_parallel != "all_reduce":
        yield f"a calibration is of data_parallel='all_reduce', and the run has {run.data_parallel!r}"
    if run.token_slices > 1:
        yield f"a calibration is of whole sequences, and the run has token_slices={run.token_slices}"


def from_calibration(sized: SizedRun, calibration: Calibration) -> Prediction:
    """Predict a step of a run before it starts, from what was measured on its machine.

    Args:
        sized: The run, which the calibration fits.
        calibration: What was measured.
    """
    costs = calibrated_costs(sized, calibration, num_cores() if computes_here(sized.run.device) else None)
    timeline, alone = simulate(sized.schedule, costs), _seconds_alone(sized.schedule, costs)
    return Prediction(timeline, FROM_CALIBRATION, alone, calibration.call, calibration.process)


def from_flops(sized: SizedRun) -> Prediction:
    """Predict a step of a run before it starts, from the FLOPs of its layers, if they are known, and its messages.

    Args:
        sized: The run.
    """
    run, _, _, schedule = sized
    source = FROM_FLOPS if isinstance(run.model, Transformer) else IN_SLOTS
    costs = seconds_of_run(sized, rates_of(run))
    timeline, least = simulate(schedule, costs), 0.0
    if isinstance(run.model, Transformer):
        layers = split_layers(run.split, transformer_costs(run.model), schedule.num_stages)
        held = (sum(len(layers[stage]) for stage in schedule.stages_of(rank)) for rank in range(schedule.num_ranks))
        least = max(held) * run.microbatches * block_seconds(run) / (1 - timeline.bubble)
    return Prediction(timeline, source, _seconds_alone(schedule, costs), least=least)


def _seconds_alone(schedule: Schedule, costs: Costs) -> float:
    """Return the seconds of a step without gathers, reductions and what comes after the update."""
    computing = {key: seconds for key, seconds in costs.of_stage.items() if key[1] in COMPUTE}
    return outcome(schedule, replace(costs, of_stage=computing, step=0.0)).makespan / schedule.num_steps


def from_steps(measured: Timeline, before: Sequence[Timeline]) -> Prediction:
    """Predict a measured step from the steps before it; the first step from its own durations.

    Args:
        measured: The step, whose schedule is simulated.
        before: Steps before it; empty if there were none.
    """
    timeline = simulate(measured.schedule, costs_of(*(before or [measured])))
    return Prediction(timeline, FROM_STEPS if before else FROM_ITSELF, timeline.makespan / measured.schedule.num_steps)
