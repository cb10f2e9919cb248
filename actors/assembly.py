"""From a plan to an actor's parts: its stages with their weights, its optimizer, its batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from raypar.actors.batches import BatchSource, batch_source
from raypar.actors.group import Group
from raypar.actors.models.build import build_model
from raypar.actors.models.model import Model
from raypar.actors.plan import Plan
from raypar.actors.stage import Stage
from raypar.actors.update import Tie, Updater


@dataclass(frozen=True)
class Assembly:
    """What one actor works with.

    stages      by number
    parameters  by logical name; a tied weight whose home is on this actor too stands there only once
    """

    stages: dict[int, Stage]
    parameters: dict[str, nn.Parameter]
    updater: Updater
    source: BatchSource


def assemble(plan: Plan, group: Group | None) -> Assembly:
    """Build this rank's part of the run. Only its own weights are made."""
    model = build_model(plan.model, plan.seed)
    train = plan.programs["train"]
    coordinate = plan.mesh.coordinate(plan.rank)
    parts = model.stages(plan.split, train.num_stages)
    own = train.stages_of(coordinate["pp"])
    indices = [index for number in own for index in parts[number]]
    modules = dict(zip(indices, model.materialize(indices, plan.seed), strict=True))
    homes = {index: train.placement[number] for number, part in enumerate(parts) for index in part}
    ties = _ties(model, homes)
    share(model, modules, ties)
    stages = {
        number: Stage(
            model,
            parts[number],
            [modules[index] for index in parts[number]],
            is_last=number == train.num_stages - 1,
            recompute=plan.recompute == "full",
            seed=plan.seed,
        )
        for number in own
    }
    shared = {tie.copy for tie in ties if tie.home_rank == tie.copy_rank}
    parameters = {
        name: parameter
        for stage in stages.values()
        for name, parameter in stage.parameters().items()
        if name not in shared
    }
    apart = [tie for tie in ties if tie.home_rank != tie.copy_rank]
    updater = Updater(parameters, model.parameter_names(), apart, group, plan.optim, plan.clip, plan.steps)
    source = batch_source(
        plan.data,
        plan.model,
        plan.micro_batch_size,
        train.num_microbatches,
        plan.mesh.dp,
        coordinate["dp"],
        plan.seed,
    )
    return Assembly(stages, parameters, updater, source)


def share(model: Model, modules: dict[int, nn.Module], ties: Sequence[Tie]) -> None:
    """Make the two ends of a tie one parameter, where both are among ``modules``."""
    for tie in ties:
        if tie.home_rank == tie.copy_rank:
            home, copy = _locate(model, modules, tie.home), _locate(model, modules, tie.copy)
            if home is not None and copy is not None:
                copy[0]._parameters[copy[1]] = home[0]._parameters[home[1]]


def _ties(model: Model, homes: dict[int, int]) -> list[Tie]:
    def rank(name: str) -> int:
        return homes[_layer(model, name)]

    return [Tie(home, rank(home), copy, rank(copy)) for home, copy in model.ties]


def _layer(model: Model, parameter: str) -> int:
    """The layer of a parameter, by the longest layer name that begins its own."""
    return max(
        (i for i, name in enumerate(model.names) if parameter.startswith(name + ".")), key=lambda i: len(model.names[i])
    )


def _locate(model: Model, modules: dict[int, nn.Module], parameter: str) -> tuple[nn.Module, str] | None:
    index = _layer(model, parameter)
    if index not in modules:
        return None
    inner, _, name = parameter[len(model.names[index]) + 1 :].rpartition(".")
    return modules[index].get_submodule(inner), name
