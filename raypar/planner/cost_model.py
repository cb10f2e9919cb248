"""A training step as actors perform it: what its actions cost on paper, and which backwards are done in halves."""

from __future__ import annotations

from typing import NamedTuple

from raypar.actors.models.partition import core_cost, split_layers, transformer_costs
from raypar.actors.specs.model import Layers, Transformer
from raypar.actors.specs.recompute import word_of
from raypar.actors.specs.run import Run
from raypar.schedules.action import Op
from raypar.schedules.passes.split_backward import in_halves
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.simulate import Costs


class _Work(NamedTuple):
    """What a microbatch costs a stage: its forward, what its backward runs again, what it can leave for W."""

    forward: float
    again: float
    later: float


def performed(run: Run, schedule: Schedule) -> Schedule:
    """The lowered schedule of a run's training step as its actors perform it: with backwards in halves, where layers
    can do them so and a pipeline's waits are filled by it.

    What a layer keeps for a W is as large as all its activations, so who runs a forward again makes the gradients of
    weights at once.
    """
    if schedule.forward_only or (isinstance(run.model, Layers) and not run.model.halves):
        return schedule
    return in_halves(schedule, costs_on_paper(run, schedule.num_stages), hold=run.recompute == "none")


def costs_on_paper(run: Run, num_stages: int) -> Costs:
    """A stage's forward lasts as its layers' FLOPs say, a backward twice as long; the user's own Layers count as stages
    of equal length."""
    of_stage: dict[tuple[int, Op], float] = {}
    for stage, (forward, again, later) in enumerate(_works(run, num_stages)):
        backward = {Op.B: 2 * forward + again, Op.I: 2 * forward + again - later, Op.W: later}
        of_stage |= {(stage, op): cost for op, cost in ({Op.F: forward} | backward).items()}
    return Costs(of_stage=of_stage)


def _works(run: Run, num_stages: int) -> list[_Work]:
    """A W makes the gradients of linear layers that are not divided, in layers that are not run again by themselves."""
    halves = run.mesh.tensor_ranks == 1
    if not isinstance(run.model, Transformer):
        return [_Work(1.0, 1.0 if run.recompute == "full" else 0.0, 1.0 if halves else 0.0)] * num_stages
    costs, body, core = transformer_costs(run.model), range(run.model.layers), core_cost(run.model)
    scores = run.model.attention == "materialised" or run.model.dropout > 0  # else the kernel does it in any case
    words = [word_of(run.recompute, body, layer) for layer in body]
    again = [
        {"none": 0.0, "selective": core if scores else 0.0, "full": cost}[word]
        for word, cost in zip(words, costs, strict=True)
    ]
    alone = [word == "full" and run.recompute != "full" for word in words]
    later = [cost - core if halves and not own else 0.0 for cost, own in zip(costs, alone, strict=True)]
    return [
        _Work(*(sum(each[layer] for layer in layers) for each in (costs, again, later)))
        for layers in split_layers(run.split, costs, num_stages)
    ]
