"""The prediction of a training step: the schedule performed on paper, and where the costs of its actions come from.

Two sources of costs exist. Before a run there are only FLOPs; after some steps there are measured durations. They
disagree, because FLOPs know neither messages nor caches nor the optimizer, so whoever shows a prediction shows its
source with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raypar.actors.specs.model import Transformer
from raypar.actors.specs.run import Run
from raypar.planner.cost_model import costs_of_run
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.measured_costs import costs_of
from raypar.schedules.simulation.simulate import simulate
from raypar.schedules.timeline import Timeline

FROM_FLOPS = "from FLOPs"
IN_SLOTS = "in slots"  # of the user's own layers no FLOPs are known: every stage takes as long
FROM_STEPS = "from the measured costs of steps before"
FROM_ITSELF = "from the measured costs of the step itself"

_LEAVES_OUT = {
    FROM_FLOPS: "FLOPs leave out messages, the optimizer, and other programs on these cores",
    IN_SLOTS: "slots take all stages to be as long, and leave out messages, the optimizer, and other programs",
    FROM_STEPS: "medians leave out waits that the schedule does not ask for",
    FROM_ITSELF: "medians leave out waits that the schedule does not ask for",
}


@dataclass(frozen=True)
class Prediction:
    """A predicted training step.

    Attributes:
        timeline: The simulated step: in FLOPs per token, in forwards of a stage, or in seconds if costs were measured.
        source: Where the costs come from: FROM_FLOPS, IN_SLOTS, FROM_STEPS or FROM_ITSELF.
    """

    timeline: Timeline
    source: str

    @property
    def bubble(self) -> str:
        """The bubble in words, "5.7% predicted from FLOPs"."""
        return f"{self.timeline.bubble:.1%} predicted {self.source}"

    @property
    def leaves_out(self) -> str:
        """Why a measured bubble is another one, in a sentence."""
        return _LEAVES_OUT[self.source]


def from_flops(run: Run, schedule: Schedule) -> Prediction:
    """Predict a step of a run before it starts, from the FLOPs of its layers if they are known.

    Args:
        run: The run.
        schedule: The lowered schedule of a training step.
    """
    source = FROM_FLOPS if isinstance(run.model, Transformer) else IN_SLOTS
    return Prediction(simulate(schedule, costs_of_run(run, schedule.num_stages)), source)


def from_steps(measured: Timeline, before: Sequence[Timeline]) -> Prediction:
    """Predict a measured step from the steps before it; the first step from its own durations.

    Args:
        measured: The step, whose schedule is simulated.
        before: Steps before it; empty if there were none.
    """
    timeline = simulate(measured.schedule, costs_of(*(before or [measured])))
    return Prediction(timeline, FROM_STEPS if before else FROM_ITSELF)
