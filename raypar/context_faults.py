"""What can be wrong with dividing sequences over the context-parallel axis."""

from __future__ import annotations

from collections.abc import Iterator

from raypar.actors.context import Context, pieces_of
from raypar.actors.mesh import Mesh
from raypar.actors.specs import GPT, Layers, Llama
from raypar.nearby import multiples_near


def context_faults(model: GPT | Llama | Layers, mesh: Mesh, context: Context, *, sequence: bool) -> Iterator[str]:
    """Everything that keeps the sequences of a model from being divided ``mesh.cp`` ways."""
    cp = mesh.cp
    if cp == 1:
        return
    if isinstance(model, Layers):
        yield f"mesh.cp is {cp}: the user's own Layers can't be divided by tokens, only a GPT or Llama: set it to 1"
        return
    if model.seq % (pieces := pieces_of(context, cp)):
        what = f"mesh.cp {cp}: context {context!r} cuts a sequence into {pieces} pieces"
        yield f"{what}, but model.seq is {model.seq}: use {multiples_near(model.seq, pieces)}"
    elif sequence and mesh.grid is None and model.seq // cp % mesh.tensor_ranks:
        whole = pieces * mesh.tensor_ranks
        yield (
            f"sequence_parallel: mesh.cp x mesh.tp = {cp * mesh.tensor_ranks} does not divide model.seq {model.seq}: "
            f"use {multiples_near(model.seq, whole)}"
        )
    if context == "ulysses":
        yield from _head_faults(model, cp, mesh.tensor_ranks if mesh.grid is None else mesh.grid.side)


def _head_faults(model: GPT | Llama, cp: int, tp: int) -> Iterator[str]:
    """Of heads that are divided ``tp`` ways already; of a grid that is its side."""
    if model.heads % (cp * tp):
        yield (
            f"context 'ulysses' divides heads: mesh.cp x mesh.tp = {cp * tp} does not divide model.heads "
            f"{model.heads}: use {multiples_near(model.heads, cp * tp)} heads, or context 'ring'"
        )
    here = max(1, model.num_kv_heads // tp)
    if model.num_kv_heads != model.heads and here % cp and cp % here:
        yield (
            f"context 'ulysses': of mesh.cp {cp} and the {here} heads of keys and values of a tensor rank one must "
            "divide the other: change model.kv_heads, or use context 'ring'"
        )
