"""How many parameters a model has, in whole and by stage, without its adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.partition import split_layers, transformer_costs
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.types import Split
from raypar.planner.sizes.tensors import adapters_of, block_tensors, embedding_tensors, head_tensors, held_count


class StageParameters(NamedTuple):
    """The parameters of a stage on one actor.

    Attributes:
        dense: Those that all replicas of the stage have.
        experts: Those of experts that actors divide.
        units: In how many units they are gathered and reduced: layers, an embedding, a head.
    """

    dense: int
    experts: int
    units: int

    @property
    def all(self) -> int:
        """Number of all of them."""
        return self.dense + self.experts


def held_by_stage(
    model: GPT | Llama, stages: Sequence[range], mesh: Mesh, *, tied: bool | None = None
) -> list[StageParameters]:
    """Return what each stage has on one actor.

    Args:
        model: The model.
        stages: The layers of each stage.
        mesh: The mesh of the actors.
        tied: Whether a tied weight counts in the first stage only; None: if this is the last one, too.
    """
    blocks, found = block_tensors(model, mesh), list[StageParameters]()
    kinds = {id(block): block for block in blocks}
    each = {kind: (held_count(one), held_count(w for w in one if w.is_expert)) for kind, one in kinds.items()}
    for stage, layers in enumerate(stages):
        counts = [each[id(blocks[layer])] for layer in layers]
        experts = sum(of_experts for _, of_experts in counts)
        dense = sum(every for every, _ in counts) - experts
        first, last = stage == 0, stage == len(stages) - 1
        if first:
            dense += held_count(embedding_tensors(model, mesh))
        if last:
            dense += held_count(head_tensors(model, mesh, tied=model.tied and (first if tied is None else tied)))
        found.append(StageParameters(dense, experts, len(layers) + first + last))
    return found


def stage_parameters(model: GPT | Llama, split: Split, num_stages: int) -> list[int]:
    """Count the parameters of each stage, undivided. A tied weight counts in the first stage only."""
    stages = split_layers(split, transformer_costs(model), num_stages)
    return [stage.all for stage in held_by_stage(model, stages, Mesh(), tied=True)]


def num_parameters(model: GPT | Llama) -> int:
    """Return the number of trainable parameters of a model. A tied weight counts once."""
    return sum(stage_parameters(model, "even", 1))


def active_parameters(model: GPT | Llama) -> int:
    """Return how many of a model's parameters compute a token: of experts those that it chooses, the router's all."""
    used = 0 if model.moe is None else model.moe.top_k
    of_experts = [one for block in block_tensors(model, Mesh()) for one in block if one.experts]
    return num_parameters(model) - sum((one.experts - used) * one.held for one in of_experts)


def adapter_parameters(model: GPT | Llama) -> int:
    """Return the number of parameters of all adapters of a model that has some."""
    return sum(map(held_count, adapters_of(model, Mesh())))
