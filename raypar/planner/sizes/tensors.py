"""The tensors of a model, by name and shape, without torch: all counts of parameters are sums over them.

With hidden size h, MLP width f, vocabulary V, sequence length s, and K heads of keys and values of width d:

- A block has h^2 for the queries, 2 h K d for keys and values, h^2 for the output, and 2 h f (GPT) or 3 h f (Llama) for
  its MLP; heads of another width d make h^2 h d times their number. Biases of queries, keys and values are d a head.
  A GPT has biases of h (output), f and h (MLP), and its two LayerNorms 2 h each; a Llama's RMSNorms have h, and those
  of queries and keys d.
- A block with E experts of width w has E times 2 h w or 3 h w instead of 2 h f or 3 h f (and a GPT their biases),
  and E h for its router; once more E h for learned noise; shared experts and a residual MLP are MLPs, too. With ep an
  actor has E / ep experts, each divided over the etp tensor ranks of an expert.
- The embedding has h V, and h for each learned position. The head has a norm and h V.
- An adapter of rank r of a layer of E inputs and F outputs has r E and r F. Tensor ranks divide the r F of layers that
  are sharded by outputs, and the r E of those that are sharded by inputs; the others are whole on each.

Tensor ranks hold norms, the biases of outputs, and what is beside folded experts whole, and the projections to keys and
values too if they do not divide the number of their heads. On a grid, which divides all tensors of a block in ways of
their own, what an actor holds of vectors is an estimate.

Source: actors/models/transformer.py and mlp.py, and actors/layers/adapter.py, whose modules the tests count.

The tensors of the user's own Layers, from the skeleton of their modules. No parameter counts as divided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.partition import split_layers, transformer_costs
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.lora import LORA
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import Split
from raypar.schedules.schedule import Schedule


class Weight(NamedTuple):
    """A trainable tensor of a model.

    Attributes:
        name: Its logical name.
        shape: Its shape in the model.
        part: The shape of what an actor has of it.
        is_linear: Whether it is of a linear layer, which can be cut into tiles.
        is_expert: Whether it is of an expert, of those that actors divide.
        experts: Of how many experts of a block the actor has such a tensor: their number is a * in the name; 0 if it is
            of none.
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[int, ...]
    is_linear: bool = False
    is_expert: bool = False
    experts: int = 0

    @property
    def whole(self) -> int:
        """Its parameters in the model."""
        return math.prod(self.shape)

    @property
    def held(self) -> int:
        """Those of an actor that has a part of it."""
        return math.prod(self.part)

    @property
    def dims(self) -> int:
        """Its number of dimensions."""
        return len(self.shape)

    @property
    def layer(self) -> str:
        """The logical name of the layer that has it."""
        return self.name.rpartition(".")[0]

    @property
    def copies(self) -> int:
        """How many tensors it stands for."""
        return self.experts or 1

    def each(self) -> Iterator[Weight]:
        """Yield the tensors that it stands for, by their logical names."""
        for expert in range(self.experts):
            yield self._replace(name=self.name.replace("*", str(expert)), experts=0)
        if not self.experts:
            yield self


Stage: TypeAlias = Sequence[Sequence[Sequence[Weight]]]  # the units of a stage, each with the tensors of its layers


class Ways(NamedTuple):
    """Into how many parts tensor ranks divide the outputs, the inputs and the bias of a linear layer."""

    outputs: int = 1
    inputs: int = 1
    bias: int = 1


def held_count(weights: Iterable[Weight]) -> int:
    """Count the parameters of an actor that has a part of each of these."""
    return sum(weight.held * weight.copies for weight in weights)


def tensors_by_stage(
    model: GPT | Llama, split: Split, num_stages: int, mesh: Mesh, layers: int = 1, *, ties: bool
) -> Sequence[Stage]:
    """Return the tensors of an actor of each stage, of experts those of the first part.

    These are the ones that learn: of a model with adapters, those of the adapters. Tiles are left out.

    Args:
        model: The model.
        split: How its layers are split into stages.
        num_stages: Number of stages.
        mesh: The mesh of the actors.
        layers: Blocks in a unit.
        ties: Whether one actor has both ends of a tied weight, of which the head's then has the embedding's name.
    """
    kinds = block_tensors(model, mesh) if model.lora is None else adapters_of(model, mesh)
    blocks = [[one._replace(name=f"blocks.{index}.{one.name}") for one in block] for index, block in enumerate(kinds)]
    stages = _in_units(blocks, split_layers(split, transformer_costs(model), num_stages), layers)
    if model.lora is None:
        embedding, head = embedding_tensors(model, mesh), head_tensors(model, mesh, tied=model.tied and ties)
        stages[0].insert(0, [embedding])
        stages[-1].append([[*head, embedding[0]] if model.tied and ties else head])
    return stages


def held_tensors(stages: Sequence[Stage], schedule: Schedule) -> list[list[Weight]]:
    """Return the tensors of an actor of each pipeline rank. A tied weight whose ends are on one rank is there once.

    Args:
        stages: The tensors of each stage.
        schedule: The schedule, which places the stages on ranks.
    """
    found: list[dict[str, Weight]] = [{} for _ in range(schedule.num_pipeline_ranks)]
    for rank, units in zip(schedule.placement, stages, strict=True):
        found[rank] |= {weight.name: weight for unit in units for layer in unit for weight in layer}
    return [[*of_rank.values()] for of_rank in found]


def block_tensors(model: GPT | Llama, mesh: Mesh) -> list[Sequence[Weight]]:
    """Return the tensors of each block on an actor, with their names inside the block; without adapters.

    Args:
        model: The model.
        mesh: The mesh of the actors.
    """
    counts = [model.num_experts(block) for block in range(model.layers)]
    kinds = {count: _block(model, count, mesh) for count in {*counts}}
    return [kinds[count] for count in counts]


def adapters_of(model: GPT | Llama, mesh: Mesh) -> list[Sequence[Weight]]:
    """Return the tensors of each block's adapters on an actor, of a model that has some."""
    assert model.lora is not None
    rank, found = model.lora.rank, list[Weight]()
    adapted = {f"{part}.{layer}.weight" for part in ("attn", "mlp") for layer in model.lora.layers}
    for weight in _block(model, 0, mesh):
        if weight.name in adapted:
            adapter = weight.name.removesuffix(".weight") + LORA
            found.append(Weight(f"{adapter}.a.weight", (rank, weight.shape[1]), (rank, weight.part[1])))
            found.append(Weight(f"{adapter}.b.weight", (weight.shape[0], rank), (weight.part[0], rank)))
    return [found] * model.layers


def embedding_tensors(model: GPT | Llama, mesh: Mesh) -> list[Weight]:
    """Return the tensors of the embeddings on an actor; the arguments are those of ``block_tensors``."""
    positions = {"learned": model.seq, "hierarchical": math.isqrt(model.seq - 1) + 1}.get(model.positions, 0)
    found = [_vocabulary(model, mesh, "embed.tokens.weight")]
    if positions:
        found.append(Weight("embed.positions.weight", (positions, model.hidden), (positions, model.hidden)))
    return found


def head_tensors(model: GPT | Llama, mesh: Mesh, *, tied: bool) -> list[Weight]:
    """Return the tensors of the final norm and, unless the embedding has it (``tied``), of the projection."""
    found = [*_norm(model, "head.norm")]
    return found if tied else [*found, _vocabulary(model, mesh, "head.out.weight", is_linear=True)]


def matrix_ranks(mesh: Mesh) -> int:
    """Return over how many tensor ranks a matrix is divided."""
    grid = mesh.grid
    return mesh.tensor_ranks if grid is None else grid.side ** (3 if grid.kind == "3d" else 2)


def _vocabulary(model: GPT | Llama, mesh: Mesh, name: str, *, is_linear: bool = False) -> Weight:
    ranks = matrix_ranks(mesh)
    return Weight(name, (model.vocab, model.hidden), (-(-model.vocab // ranks), model.hidden), is_linear)


@lru_cache(maxsize=1024)  # a search asks for the same ones thousands of times
def _block(model: GPT | Llama, num_experts: int, mesh: Mesh) -> Sequence[Weight]:
    """Return the tensors of a block with so many experts, or with an MLP if these are 0."""
    h, width, moe = model.hidden, model.head_size, model.moe
    column, row = _ways(mesh, mesh.tensor_ranks)
    vectors = 1 if mesh.grid is None else matrix_ranks(mesh)
    of_keys = Ways() if mesh.grid is None and model.num_kv_heads % mesh.tensor_ranks else column
    found = list[Weight]()
    for norm in ("norm1", "norm2", "attn_norm", "mlp_norm")[: model.norms]:
        found += _norm(model, norm, vectors)
    found += _linear("attn.q", (model.heads * width, h), column, bias=model.qkv_bias)
    for one in "kv":
        found += _linear(f"attn.{one}", (model.num_kv_heads * width, h), of_keys, bias=model.qkv_bias)
    if model.qk_norm:
        found += [Weight(f"attn.{one}_norm.weight", (width,), (width,)) for one in "qk"]
    found += _linear("attn.out", (h, model.heads * width), row, bias=model.has_biases)
    if moe is None or not num_experts:
        return [*found, *_mlp(model, "mlp.", model.mlp_width, column, row)]
    routers = ("weight", "noise_weight") if moe.gate == "shazeer" else ("weight",)
    found += [Weight(f"mlp.router.{one}", (num_experts, h), (num_experts, h)) for one in routers]
    beside = _ways(mesh, 1 if mesh.folds_experts else mesh.tensor_ranks)
    if moe.shared:
        found += _mlp(model, "mlp.shared.", moe.shared * model.expert_width, *beside)
    if moe.residual:
        found += _mlp(model, "mlp.residual.", model.mlp_width, *beside)
        found += _linear("mlp.mix", (2, h), Ways(), bias=True)
    if experts := mesh.held_experts(num_experts):
        of_expert = _mlp(model, "mlp.experts.*.", model.expert_width, *_ways(mesh, mesh.expert_ranks))
        found += [one._replace(is_expert=mesh.divides_experts, experts=experts) for one in of_expert]
    return found


def _ways(mesh: Mesh, ranks: int) -> tuple[Ways, Ways]:
    """Return how so many tensor ranks divide layers by outputs, and layers by inputs; a grid divides all by both."""
    if mesh.grid is None:
        return Ways(ranks, 1, ranks), Ways(1, ranks, 1)
    ranks = matrix_ranks(mesh)
    both = Ways(mesh.grid.side, ranks // mesh.grid.side, ranks)
    return both, both


def _mlp(model: GPT | Llama, under: str, width: int, column: Ways, row: Ways) -> Iterator[Weight]:
    for one in ("gate", "up")[-(model.mlp_matrices - 1) :]:
        yield from _linear(f"{under}{one}", (width, model.hidden), column, bias=model.has_biases)
    yield from _linear(f"{under}down", (model.hidden, width), row, bias=model.has_biases)


def _linear(name: str, shape: tuple[int, int], ways: Ways, *, bias: bool) -> Iterator[Weight]:
    """Yield the weight and the bias of a linear layer, of which the first ranks have the most."""
    outputs, inputs = shape
    part = (-(-outputs // ways.outputs), -(-inputs // ways.inputs))
    yield Weight(f"{name}.weight", shape, part, is_linear=True)
    if bias:
        yield Weight(f"{name}.bias", (outputs,), (-(-outputs // ways.bias),), is_linear=True)


def _norm(model: GPT | Llama, name: str, ways: int = 1) -> Iterator[Weight]:
    for one in ("weight", "bias") if model.has_biases else ("weight",):
        yield Weight(f"{name}.{one}", (model.hidden,), (-(-model.hidden // ways),))


def user_tensors(run: Run, num_stages: int, skeleton: Skeleton) -> Sequence[Stage]:
    """Return the trainable tensors of an actor of each stage, of experts those of the first part.

    A tied weight has the name of its owner.

    Args:
        run: The run.
        num_stages: Number of stages.
        skeleton: The skeleton of its model.
    """
    stages = skeleton.model.stages(run.split, num_stages)
    layers = [[*_layer(skeleton, index, run.mesh)] for stage in stages for index in stage]
    return _in_units(layers, stages, run.zero_units)


def _in_units(
    layers: Sequence[Sequence[Weight]], stages: Iterable[range], size: int
) -> list[list[Sequence[Sequence[Weight]]]]:
    """Return the units of each stage, of so many layers or what is left of the stage."""
    return [
        [layers[first : min(first + size, stage.stop)] for first in range(stage.start, stage.stop, size)]
        for stage in stages
    ]


def _layer(skeleton: Skeleton, index: int, mesh: Mesh) -> Iterator[Weight]:
    """Yield the trainable tensors of a layer on the first rank of a mesh, which has the first part of the experts."""
    from raypar.actors.models.tiles.tiled import linears_of  # imports torch

    layer, module = skeleton.model.names[index], skeleton.model.skeleton[index]
    linears = {path for path, _ in linears_of(layer, module)}
    for inner, parameter in module.named_parameters():
        name, shape = f"{layer}.{inner}", tuple(parameter.shape)
        expert = skeleton.model.experts.get(name)
        is_first = expert is None or (not mesh.expert_actors and expert.part(mesh.ep) == 0)
        if parameter.requires_grad and is_first:
            is_linear, is_expert = name.rpartition(".")[0] in linears, expert is not None and mesh.divides_experts
            yield Weight(skeleton.originals.get(name, name), shape, shape, is_linear, is_expert)
