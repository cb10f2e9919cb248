"""What can be wrong with dividing a model over a grid of tensor ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raypar.actors.grid import grid_of
from raypar.actors.specs import GPT, Batches, Llama, Text
from raypar.nearby import heads_near, multiples_near


def grid_faults(model: GPT | Llama, tp: str, *, sequence: bool) -> Iterator[str]:
    """Everything that keeps a model from being divided over the grid ``tp``; a vocabulary need not be a multiple."""
    grid, named = grid_of(tp), f"mesh.tp is {tp!r}"
    if sequence:
        yield f"sequence_parallel: {named}, which divides norms and dropout already: set it to false"
    if model.heads % grid.side:
        near = heads_near(model.heads, grid.side, model.hidden)
        yield f"{named}, but {grid.side} does not divide model.heads {model.heads}: use {near}"
    if isinstance(model, Llama) and model.num_kv_heads % grid.side:
        near = multiples_near(model.num_kv_heads, grid.side)
        yield f"{named}, but {grid.side} does not divide model.kv_heads {model.num_kv_heads}: use {near}"
    inputs = grid.side**2 if grid.kind == "3d" else grid.side  # into how many parts those of a matrix go
    if model.hidden % inputs:
        near = multiples_near(model.hidden, inputs)
        yield f"{named}, but {inputs} does not divide model.hidden {model.hidden}: use {near}"
    if isinstance(model, Llama) and model.mlp_width % inputs:
        near = multiples_near(model.mlp_width, inputs)
        yield f"{named}, but {inputs} does not divide model.ffn {model.mlp_width}: use {near}"
    if model.vocab < grid.side:
        yield f"{named}, but model.vocab {model.vocab} is less than {grid.side}: set it to {grid.side} at least"


def batch_faults(tp: str, data: Text | Batches, micro_batch_size: int) -> Iterator[str]:
    """Microbatches that the grid ``tp`` does not divide; of the user's own batches the first one is looked at."""
    parts = grid_of(tp).batch_parts
    fix = f"of which mesh.tp {tp!r} can't make {parts} equal parts: use"
    if isinstance(data, Text):
        if micro_batch_size % parts:
            yield f"micro_batch_size is {micro_batch_size}, {fix} {multiples_near(micro_batch_size, parts)}"
        return
    for name, fn in (("data.fn", data.fn), ("data.validate", data.validate)):
        try:
            batch: Any = fn(0, 0, 0) if fn is not None else ()
            sizes = {len(value) for values in batch for value in (values if isinstance(values, tuple) else (values,))}
        except Exception:  # the actors tell, with its trace; here its files may be missing
            continue
        for size in sorted(size for size in sizes if size % parts):
            yield f"{name} returns {size} samples, {fix} {multiples_near(size, parts)}"
