"""How a model is divided over the tensor-parallel and context-parallel axes of a mesh."""

from __future__ import annotations

from collections.abc import Mapping

from raypar.actors.collective.group import Group
from raypar.actors.context_parallel.cores import ContextParallel
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.base import Model
from raypar.actors.models.parallel_plan import Division
from raypar.actors.tensor_parallel.grid.cube import CubeParallel
from raypar.actors.tensor_parallel.grid.summa import SquareParallel
from raypar.actors.tensor_parallel.megatron import TensorParallel
from raypar.actors.worker.plan import Plan


def divisions_of(plan: Plan, model: Model, groups: Mapping[str, Group]) -> list[Division]:
    """How the layers of a run are divided, in this order: by tokens, then by weights."""
    divisions: list[Division] = []
    if "cp" in groups:
        divisions.append(ContextParallel(model, groups["cp"], plan.run.context))
    if "tp" in groups:
        divisions.append(tensor_division(model, plan.run.mesh, groups, sequence=plan.run.sequence_parallel))
    return divisions


def tensor_division(model: Model, mesh: Mesh, groups: Mapping[str, Group], *, sequence: bool) -> Division:
    """How layers are divided over the tensor ranks of a mesh, by number or by grid; ``groups`` of this rank, by key."""
    if mesh.grid is None:
        return TensorParallel(model, groups["tp"], sequence=sequence)
    return CubeParallel(model, groups) if mesh.grid.kind == "3d" else SquareParallel(model, groups)
