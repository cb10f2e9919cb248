"""The tensors of the user's own Layers, from the skeleton of their modules. No parameter counts as divided."""

from __future__ import annotations

from collections.abc import Iterator

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.run import Run
from raypar.planner.sizes.tensors import Stage, Weight


def user_tensors(run: Run, num_stages: int, skeleton: Skeleton) -> list[Stage]:
    """Return the trainable tensors of an actor of each stage, of experts those of the first part.

    A tied weight has the name of its home.

    Args:
        run: The run.
        num_stages: Number of stages.
        skeleton: The skeleton of its model.
    """
    stages = skeleton.model.stages(run.split, num_stages)
    layers = [[*_layer(skeleton, index, run.mesh)] for stage in stages for index in stage]
    unit = run.zero_units
    return [
        [layers[first : min(first + unit, stage.stop)] for first in range(stage.start, stage.stop, unit)]
        for stage in stages
    ]


def _layer(skeleton: Skeleton, index: int, mesh: Mesh) -> Iterator[Weight]:
    """Yield the trainable tensors of a layer on the first rank of a mesh, which has the first part of the experts."""
    from raypar.actors.models.tiled import linears_of  # imports torch

    layer, module = skeleton.model.names[index], skeleton.model.skeleton[index]
    linears = {path for path, _ in linears_of(layer, module)}
    for inner, parameter in module.named_parameters():
        name, shape = f"{layer}.{inner}", tuple(parameter.shape)
        expert = skeleton.model.experts.get(name)
        is_first = expert is None or (not mesh.expert_actors and expert.part(mesh.ep) == 0)
        if parameter.requires_grad and is_first:
            is_linear, is_expert = name.rpartition(".")[0] in linears, expert is not None and mesh.divides_experts
            yield Weight(skeleton.originals.get(name, name), shape, shape, is_linear, is_expert)
