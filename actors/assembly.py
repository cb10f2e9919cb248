"""From a plan to an actor's parts: its stages with their weights, its optimizer, its batches."""

from __future__ import annotations

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
    ties, same = _ties(model, homes)
    _share(model, modules, same)
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
    parameters = {
        name: parameter
        for stage in stages.values()
        for name, parameter in stage.parameters().items()
        if name not in same
    }
    updater = Updater(parameters, model.parameter_names(), ties, group, plan.optim, plan.clip, plan.steps)
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


def _ties(model: Model, homes: dict[int, int]) -> tuple[list[Tie], dict[str, str]]:
    """The ties between ranks, and on one rank which parameter is the same as which.

    A rank holds a tied weight once: as its home, or else as the first of its copies there.
    """
    ties: list[Tie] = []
    same: dict[str, str] = {}
    first: dict[tuple[str, int], str] = {}
    for home, copy in model.ties:
        home_rank, copy_rank = homes[_layer(model, home)], homes[_layer(model, copy)]
        owner = home if home_rank == copy_rank else first.setdefault((home, copy_rank), copy)
        if owner == copy:
            ties.append(Tie(home, home_rank, copy, copy_rank))
        else:
            same[copy] = owner
    return ties, same


def _share(model: Model, modules: dict[int, nn.Module], same: dict[str, str]) -> None:
    """Make the parameters that are the same one object, where they are among ``modules``."""
    for copy, owner in same.items():
        target, source = _locate(model, modules, copy), _locate(model, modules, owner)
        if target is not None and source is not None:
            target[0]._parameters[target[1]] = source[0]._parameters[source[1]]


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
