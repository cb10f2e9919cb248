"""How many parameters a model has: in whole, on a pipeline rank, and on an actor.

The counts of a GPT and a Llama are formulas of the sizes, so that they take no time and no torch. With hidden size h,
MLP width f, vocabulary V, sequence length s, and K heads of keys and values of width d:

- A block has h^2 for the queries, 2 h K d for keys and values, h^2 for the output, and 2 h f (GPT) or 3 h f (Llama) for
  its MLP; heads of another width d make h^2 h d times their number. Biases of queries, keys and values are d a head.
  A GPT has biases of h (output), f and h (MLP), and its two LayerNorms 2 h each; a Llama's RMSNorms have h, and those
  of queries and keys d.
- A block with E experts of width w has E times 2 h w or 3 h w in the place of 2 h f or 3 h f (and a GPT their biases),
  and E h for its router; once more E h for learned noise; shared experts and a residual MLP are MLPs, too. With ep an
  actor has E / ep experts, each divided over the etp tensor ranks of an expert.
- The embedding has h V, and h for each learned position. The head has a norm and h V.

Source: actors/models/transformer.py, gpt.py and llama.py, whose modules the tests count. The layers of the user's own
model are counted from its skeleton.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain, pairwise

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.partition import split_layers, transformer_costs
from raypar.actors.models.tile_names import tile_count
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.types import Split
from raypar.schedules.schedule import Schedule


def num_parameters(model: GPT | Llama) -> int:
    """Return the number of trainable parameters of a model. A tied weight counts once."""
    alone = Mesh()
    return (
        _blocks(model, range(model.layers), alone)
        + embedding_weights(model, 1)
        + head_weights(model, 1, tied=model.tied)
    )


def active_parameters(model: GPT | Llama) -> int:
    """Return how many of a model's parameters compute a token: of experts those that it chooses, the router's all."""
    idle = 0
    if model.moe is not None:
        divided, whole = _mlp(model, model.expert_width)
        counts = [model.num_experts(block) for block in model.moe.blocks(model.layers)]
        idle = sum(count - model.moe.top_k for count in counts) * (divided + whole)
    return num_parameters(model) - idle


def held_parameters(model: GPT | Llama, split: Split, schedule: Schedule, mesh: Mesh) -> list[int]:
    """Count the parameters that an actor of each pipeline rank holds.

    If actors of one rank hold different numbers, because the vocabulary does not divide evenly, the largest counts.

    Args:
        model: The model.
        split: How its layers are split into stages.
        schedule: The schedule, which places the stages on ranks.
        mesh: The mesh of the actors. On a grid of tensor ranks the counts are estimates: vectors are divided in ways of
            their own.

    Returns:
        The counts by pipeline rank. If both ends of a tied weight are on one rank, it counts once, else twice.
    """
    ranks = matrix_ranks(mesh)
    first, last = schedule.placement[0], schedule.placement[-1]
    held = [0] * schedule.num_pipeline_ranks
    for stage, layers in enumerate(split_layers(split, transformer_costs(model), schedule.num_stages)):
        held[schedule.placement[stage]] += _blocks(model, layers, mesh)
    held[first] += embedding_weights(model, ranks)
    held[last] += head_weights(model, ranks, tied=model.tied and first == last)
    return held


_LEARNED = ("learned", "hierarchical")  # positions with a weight of their own
_LARGEST = 16  # tensors of a stage whose sizes are told
Group = tuple[int, Sequence[Sequence[int]]]  # parameters without tiles; of each layer, those of each tile


@dataclass(frozen=True)
class Units:
    """The parameters of a stage that are gathered together, where weights are sharded over replicas.

    Attributes:
        whole: Parameters of all units together. A weight that two units share counts once.
        two: The most parameters that are whole at a time: those that a layer or a tile needs, and the next one, whose
            units are gathered meanwhile.
        largest: Sizes of the largest tensors, in falling order; of many only the first ones.
        tensors: Number of all tensors. A reduction sends a flag with the gradient of each.
        count: Number of units: what is gathered at once, and by itself.
        experts: Parameters of experts among ``whole``, if experts are divided over actors.
        expert_tensors: Number of their tensors.
        staying: Those of ``whole`` that nobody gathers, as no other actor holds them. They are not in ``two``.
    """

    whole: int
    two: int
    largest: tuple[int, ...]
    tensors: int
    count: int
    experts: int = 0
    expert_tensors: int = 0
    staying: int = 0

    @property
    def gathered(self) -> int:
        """Parameters of all units that are gathered."""
        return self.whole - self.staying

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        sizes: Iterable[int],
        tensors: int,
        shared: int = 0,
        experts: tuple[int, int] = (0, 0),
        staying: int = 0,
    ) -> Units:
        """Return the units of a stage.

        Args:
            groups: What is gathered together in turn: parameters without tiles, and those of each tile of each layer.
            sizes: The size of each tensor, or tile of one; the smaller ones may be left out.
            tensors: Number of all tensors.
            shared: Parameters that count in two groups.
            experts: Parameters of experts, if experts are divided over actors, and the number of their tensors.
            staying: Parameters that are in no group, because nobody gathers them.
        """
        whole = sum(rest + sum(map(sum, layers)) for rest, layers in groups) - shared + staying
        back = [(rest, [tiles[::-1] for tiles in layers[::-1]]) for rest, layers in groups[::-1]]
        count = sum((rest > 0) + sum(map(len, layers)) for rest, layers in groups)
        most = max(_most_in_turn(groups), _most_in_turn(back))
        return cls(whole, most, tuple(nlargest(_LARGEST, sizes)), tensors, max(1, count), *experts, staying)


def _most_in_turn(groups: Sequence[Group]) -> int:
    """Return the most parameters that two visits in turn need, of a pass over the groups."""
    visits = [
        (number, rest, tile)
        for number, (rest, layers) in enumerate(groups)
        for tiles in layers
        for tile in (0, *tiles)  # a layer is entered before its first tile
    ]
    pairs = pairwise([*visits, (len(groups), 0, 0)])
    return max(
        (
            one + cut + other + following - (one if at == then else 0)
            for (at, one, cut), (then, other, following) in pairs
        ),
        default=0,
    )


def unit_parameters(
    model: GPT | Llama,
    split: Split,
    num_stages: int,
    mesh: Mesh,
    layers: int,
    tile: Mapping[str, int],
    *,
    experts_stay: bool = False,
) -> list[Units]:
    """Count the parameters of each stage's units on an actor.

    Args:
        model: The model.
        split: How its layers are split into stages.
        num_stages: Number of stages.
        mesh: The mesh of the actors.
        layers: Layers of the body in a unit.
        tile: Into how many tiles linear layers are cut, by pattern of their names.
        experts_stay: Whether experts stay whole on their actor, so that nobody gathers them.
    """
    ranks = matrix_ranks(mesh)
    of_expert = mesh.expert_ranks if mesh.divides_experts else ranks
    units = []
    for stage, held in enumerate(split_layers(split, transformer_costs(model), num_stages)):
        groups: list[Group] = []
        sizes = [model.hidden**2 // ranks] * len(held)
        tensors = sum(_block_tensors(model, index, mesh) for index in held)
        for start in range(0, len(held), layers):
            blocks = held[start : start + layers]
            mlps = [_mlp_tiles(model, tile, index, mesh) for index in blocks]
            for index, mlp in zip(blocks, mlps, strict=True):
                parts = of_expert if model.num_experts(index) else ranks
                sizes += [cut // parts for cut in chain.from_iterable(mlp)]
            tensors += sum(len(cuts) - 1 for mlp in mlps for cuts in mlp) * _linear_tensors(model)
            stay = [experts_stay and model.num_experts(index) > 0 for index in blocks]
            tiles = [
                [] if stays else [cut for cuts in mlp if len(cuts) > 1 for cut in cuts]
                for mlp, stays in zip(mlps, stay, strict=True)
            ]
            apart = sum(own_expert_parameters(model, index, mesh) for index in blocks) if experts_stay else 0
            groups.append((_blocks(model, blocks, mesh) - sum(map(sum, tiles)) - apart, tiles))
        vocab = -(-model.vocab // ranks) * model.hidden
        if stage == 0:
            groups.insert(0, (embedding_weights(model, ranks), [[]]))
            sizes.append(vocab)
            tensors += 1 + (model.positions in _LEARNED)
        shared = vocab if model.tied and num_stages == 1 else 0
        if stage == num_stages - 1:
            cuts = _cut(vocab, tile_count(tile, "head.out"))
            groups.append(
                (head_weights(model, ranks, tied=False) - (vocab if cuts[1:] else 0), [cuts if cuts[1:] else []])
            )
            sizes += [] if shared else cuts
            tensors += _linear_tensors(model) + (0 if shared else len(cuts))
        experts = [(own_expert_parameters(model, block, mesh), _expert_tensors(model, block, mesh)) for block in held]
        own = [sum(column) for column in zip(*experts, strict=True)] if mesh.divides_experts and experts else [0, 0]
        staying = own[0] if experts_stay else 0
        units.append(Units.of(groups, sizes, tensors, shared, (own[0], own[1]), staying))
    return units


def _block_tensors(model: GPT | Llama, block: int, mesh: Mesh) -> int:
    """Return the number of tensors of a block; those of linear layers that are cut into tiles count as one."""
    linear, moe = _linear_tensors(model), model.moe
    mlp = model.mlp_matrices * linear
    attention_and_norms = 3 + linear * (1 + model.norms)  # queries, keys, values; the output and norms may have biases
    attention_and_norms += 3 * model.qkv_bias + 2 * _has_norms(model)
    if not model.num_experts(block):
        return attention_and_norms + mlp
    assert moe is not None
    routers = 2 if moe.gate == "shazeer" else 1
    beside = (mlp if moe.shared else 0) + (mlp + 2 if moe.residual else 0)
    return attention_and_norms + _expert_tensors(model, block, mesh) + routers + beside


def _expert_tensors(model: GPT | Llama, block: int, mesh: Mesh) -> int:
    """Return the number of tensors of the experts of a block that one actor holds."""
    return mesh.held_experts(model.num_experts(block)) * model.mlp_matrices * _linear_tensors(model)


def _linear_tensors(model: GPT | Llama) -> int:
    """Return the number of tensors of a linear layer of an MLP, and of a norm: a Llama has no biases."""
    return 1 if isinstance(model, Llama) else 2


def _mlp_tiles(model: GPT | Llama, tile: Mapping[str, int], block: int, mesh: Mesh) -> list[list[int]]:
    """Return the parameters of each linear layer of a block's MLP, or of each of an actor's experts, by tile."""
    h, gated, num_experts = model.hidden, isinstance(model, Llama), model.num_experts(block)
    f = model.expert_width if num_experts else model.mlp_width
    shapes = {"gate": (f, h), "up": (f, h), "down": (h, f)}
    names = shapes if gated else ("up", "down")
    sizes = {name: shapes[name][0] * (shapes[name][1] + (not gated)) for name in names}
    tiles = [_cut(size, tile_count(tile, f"blocks.{block}.mlp.{name}")) for name, size in sizes.items()]
    return tiles * (mesh.held_experts(num_experts) if num_experts else 1)


def _cut(size: int, count: int) -> list[int]:
    return [size // count] * count


def stage_parameters(model: GPT | Llama, split: Split, num_stages: int) -> list[int]:
    """Count the parameters of each stage, undivided. A tied weight counts in the first stage only."""
    stages = split_layers(split, transformer_costs(model), num_stages)
    counts = [_blocks(model, layers, Mesh()) for layers in stages]
    counts[0] += embedding_weights(model, 1)
    counts[-1] += head_weights(model, 1, tied=model.tied)
    return counts


def matrix_ranks(mesh: Mesh) -> int:
    """Return over how many tensor ranks a matrix is divided."""
    grid = mesh.grid
    return mesh.tensor_ranks if grid is None else grid.side ** (3 if grid.kind == "3d" else 2)


def _blocks(model: GPT | Llama, blocks: range, mesh: Mesh) -> int:
    """Count the parameters of some blocks on one actor; see ``block_parameters``."""
    kinds = {model.num_experts(block): block for block in blocks}
    times = Counter(model.num_experts(block) for block in blocks)
    return sum(times[kind] * block_parameters(model, block, mesh) for kind, block in kinds.items())


def block_parameters(model: GPT | Llama, block: int, mesh: Mesh) -> int:
    """Count the parameters of a block on one actor.

    A grid divides all tensors. Other tensor ranks hold norms and the biases of outputs whole, and the projections to
    keys and values too if they do not divide the number of their heads.

    Args:
        model: The model.
        block: The block's index.
        mesh: The mesh of the actors.
    """
    h, width, ranks = model.hidden, model.head_size, matrix_ranks(mesh)
    each = width * (h + model.qkv_bias)  # of the queries, keys or values of a head
    keys, is_shared = each * model.num_kv_heads, model.num_kv_heads % ranks > 0
    of_mlp, whole = _beside_experts(model, block) if model.num_experts(block) else _mlp(model, model.mlp_width)
    if model.num_experts(block) and mesh.folds_experts:  # what is beside experts each rank has whole, for its tokens
        of_mlp, whole = 0, of_mlp + whole
    divided = model.heads * (each + width * h) + of_mlp
    shared, normed = whole + (model.norms * h if isinstance(model, Llama) else 5 * h), 2 * width * _has_norms(model)
    if mesh.grid is not None:
        return (divided + 2 * keys + shared) // ranks + normed + own_expert_parameters(model, block, mesh)
    held = keys if is_shared else keys // ranks
    return divided // ranks + 2 * held + shared + normed + own_expert_parameters(model, block, mesh)


def _has_norms(model: GPT | Llama) -> bool:
    """Return whether queries and keys pass a norm each."""
    return isinstance(model, Llama) and model.qk_norm


def _mlp(model: GPT | Llama, width: int) -> tuple[int, int]:
    """Count the parameters of an MLP: those that tensor ranks divide, and those that each has whole."""
    biases = (0, 0) if isinstance(model, Llama) else (width, model.hidden)
    return model.mlp_matrices * model.hidden * width + biases[0], biases[1]


def own_expert_parameters(model: GPT | Llama, block: int, mesh: Mesh) -> int:
    """Count the parameters of the experts of a block that one actor holds."""
    divided, whole = _mlp(model, model.expert_width)
    ranks = mesh.expert_ranks if mesh.divides_experts else matrix_ranks(mesh)
    each = divided // ranks + (whole if mesh.grid is None else whole // ranks)
    return mesh.held_experts(model.num_experts(block)) * each


def _beside_experts(model: GPT | Llama, block: int) -> tuple[int, int]:
    """Count the parameters beside the experts of a block: those that tensor ranks divide, and others."""
    moe, h = model.moe, model.hidden
    assert moe is not None
    mlps = [_mlp(model, moe.shared * model.expert_width)] if moe.shared else []
    mlps += [_mlp(model, model.mlp_width)] if moe.residual else []
    router = model.num_experts(block) * h * (2 if moe.gate == "shazeer" else 1)
    mix = 2 * h + 2 if moe.residual else 0
    return sum(divided for divided, _ in mlps), sum(whole for _, whole in mlps) + router + mix


def embedding_weights(model: GPT | Llama, ranks: int) -> int:
    """Count the parameters of the embeddings on one of so many tensor ranks."""
    positions = {"learned": model.seq, "hierarchical": math.isqrt(model.seq - 1) + 1}.get(model.positions, 0)
    return (-(-model.vocab // ranks) + positions) * model.hidden


def head_weights(model: GPT | Llama, ranks: int, *, tied: bool) -> int:
    """Count the final norm and, unless the embedding's weight is ``tied`` to it here, the projection."""
    norm = model.hidden if isinstance(model, Llama) else 2 * model.hidden
    return norm + (0 if tied else -(-model.vocab // ranks) * model.hidden)
