"""The tensors of a model, by name and size, without torch: what owners share out, as they own tensors whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.partition import split_layers, transformer_costs
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.types import Split
from raypar.planner.sizes.parameters import matrix_ranks
from raypar.schedules.schedule import Schedule


@dataclass(frozen=True)
class Weight:
    """A trainable tensor of a model.

    Attributes:
        name: Its logical name.
        whole: Its parameters in the model.
        held: Those of an actor that has a part of it.
        dims: Its number of dimensions.
        is_expert: Whether it is of an expert, of those that actors divide.
    """

    name: str
    whole: int
    held: int
    dims: int
    is_expert: bool = False


def held_tensors(model: GPT | Llama, split: Split, schedule: Schedule, mesh: Mesh) -> list[list[Weight]]:
    """Return the tensors of an actor of each pipeline rank, of experts those of the first part.

    A tied weight whose ends are on one rank is there once, in the embedding. Adapters and tiles are left out. On a grid
    of tensor ranks what an actor holds is an estimate.

    Args:
        model: The model.
        split: How its layers are split into stages.
        schedule: The schedule, which places the stages on ranks.
        mesh: The mesh of the actors.
    """
    first, last = schedule.placement[0], schedule.placement[-1]
    found: list[list[Weight]] = [[] for _ in range(schedule.num_pipeline_ranks)]
    found[first] += _embedding(model, mesh)
    for stage, layers in enumerate(split_layers(split, transformer_costs(model), schedule.num_stages)):
        for block in layers:
            found[schedule.placement[stage]] += _block(model, block, mesh)
    found[last] += _head(model, mesh, tied=model.tied and first == last)
    return found


def _embedding(model: GPT | Llama, mesh: Mesh) -> list[Weight]:
    positions = {"learned": model.seq, "hierarchical": math.isqrt(model.seq - 1) + 1}.get(model.positions, 0)
    found = [_vocabulary(model, mesh, "embed.tokens.weight")]
    if positions:
        found.append(Weight("embed.positions.weight", positions * model.hidden, positions * model.hidden, 2))
    return found


def _head(model: GPT | Llama, mesh: Mesh, *, tied: bool) -> list[Weight]:
    return [*_norm(model, "head.norm")] + ([] if tied else [_vocabulary(model, mesh, "head.out.weight")])


def _vocabulary(model: GPT | Llama, mesh: Mesh, name: str) -> Weight:
    held = -(-model.vocab // matrix_ranks(mesh)) * model.hidden
    return Weight(name, model.vocab * model.hidden, held, 2)


def _block(model: GPT | Llama, block: int, mesh: Mesh) -> Iterator[Weight]:
    h, width, ranks = model.hidden, model.head_size, matrix_ranks(mesh)
    under = f"blocks.{block}"
    for norm in ("norm1", "norm2", "attn_norm", "mlp_norm")[: model.norms]:
        yield from _norm(model, f"{under}.{norm}")
    shares_keys = model.num_kv_heads % ranks > 0 and mesh.grid is None
    for one, heads in (("q", model.heads), ("k", model.num_kv_heads), ("v", model.num_kv_heads)):
        parts = 1 if shares_keys and one != "q" else ranks
        yield from _linear(f"{under}.attn.{one}", (heads * width, h), parts, bias=model.qkv_bias)
    if isinstance(model, Llama) and model.qk_norm:
        yield from (Weight(f"{under}.attn.{one}_norm.weight", width, width, 1) for one in "qk")
    yield from _linear(f"{under}.attn.out", (h, model.heads * width), ranks, bias=isinstance(model, GPT), is_row=True)
    moe, num_experts = model.moe, model.num_experts(block)
    if moe is None or not num_experts:
        yield from _mlp(model, f"{under}.mlp", model.mlp_width, ranks)
        return
    yield Weight(f"{under}.mlp.router.weight", num_experts * h, num_experts * h, 2)
    if moe.gate == "shazeer":
        yield Weight(f"{under}.mlp.router.noise_weight", num_experts * h, num_experts * h, 2)
    beside = 1 if mesh.folds_experts else ranks
    if moe.shared:
        yield from _mlp(model, f"{under}.mlp.shared", moe.shared * model.expert_width, beside)
    if moe.residual:
        yield from _mlp(model, f"{under}.mlp.residual", model.mlp_width, beside)
        yield from _linear(f"{under}.mlp.mix", (2, h), 1, bias=True)
    divided = mesh.divides_experts
    for expert in range(mesh.held_experts(num_experts)):
        name = f"{under}.mlp.experts.{expert}"
        yield from _mlp(model, name, model.expert_width, mesh.expert_ranks if divided else ranks, is_expert=divided)


def _mlp(model: GPT | Llama, name: str, width: int, ranks: int, *, is_expert: bool = False) -> Iterator[Weight]:
    bias = isinstance(model, GPT)
    for one in ("up",) if bias else ("gate", "up"):
        yield from _linear(f"{name}.{one}", (width, model.hidden), ranks, bias=bias, is_expert=is_expert)
    yield from _linear(f"{name}.down", (model.hidden, width), ranks, bias=bias, is_row=True, is_expert=is_expert)


def _linear(
    name: str, shape: Sequence[int], ranks: int, *, bias: bool, is_row: bool = False, is_expert: bool = False
) -> Iterator[Weight]:
    """Yield the weight and the bias of a linear layer; each rank has the whole bias of one whose inputs are divided."""
    size = math.prod(shape)
    yield Weight(f"{name}.weight", size, size // ranks, 2, is_expert)
    if bias:
        yield Weight(f"{name}.bias", shape[0], shape[0] if is_row else shape[0] // ranks, 1, is_expert)


def _norm(model: GPT | Llama, name: str) -> Iterator[Weight]:
    for one in ("weight", "bias") if isinstance(model, GPT) else ("weight",):
        yield Weight(f"{name}.{one}", model.hidden, model.hidden, 1)
