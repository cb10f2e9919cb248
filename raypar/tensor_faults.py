"""What can be wrong with dividing a model over the tensor-parallel axis."""

from __future__ import annotations

from collections.abc import Iterator

from raypar.actors.specs import GPT, Layers, Llama
from raypar.actors.world import DataParallel
from raypar.grid_faults import grid_faults
from raypar.nearby import heads_near, multiples_near


def tensor_faults(
    model: GPT | Llama | Layers, tp: int | str, data_parallel: DataParallel, *, sequence: bool
) -> Iterator[str]:
    """Everything that keeps a model from being divided ``tp`` ways, or over the grid ``tp``; a vocabulary need not be a
    multiple, and what is a multiple of the heads is one of ``tp`` too. A user's plan is checked with the modules."""
    if tp == 1:
        return
    if data_parallel == "parameter_server":
        yield f"mesh.tp is {tp!r}, but servers hold whole weights: set data_parallel to 'all_reduce'"
    if isinstance(model, Layers):
        if isinstance(tp, str):
            yield f"mesh.tp is {tp!r}: your own layers are divided by a plan, over a number of actors: set it to 2, say"
        elif not model.plan:
            yield (
                f"mesh.tp is {tp}, but of your own layers it is not known how to divide them: "
                'give Layers(plan={"layers.*.up": "column", "layers.*.down": "row"}), say, or set it to 1'
            )
        if sequence:
            yield "sequence_parallel: of your own layers it is not known where the sequence is: set it to False"
        return
    if isinstance(tp, str):
        yield from grid_faults(model, tp, sequence=sequence)
        return
    if model.heads % tp:
        near = heads_near(model.heads, tp, model.hidden)
        fewer = next(fewer for fewer in range(tp - 1, 0, -1) if model.heads % fewer == 0)
        yield f"mesh.tp {tp} does not divide model.heads {model.heads}: use {near}, or set mesh.tp to {fewer}"
    if model.num_kv_heads != model.heads and model.num_kv_heads % tp and tp % model.num_kv_heads:
        fewer = max(kv for kv in range(1, tp) if tp % kv == 0)
        yield f"mesh.tp {tp}, model.kv_heads {model.num_kv_heads}: one must divide the other, use {fewer} or {tp}"
    if isinstance(model, Llama) and model.mlp_width % tp:
        yield f"mesh.tp {tp} does not divide model.ffn {model.mlp_width}: use {multiples_near(model.mlp_width, tp)}"
    if sequence and model.seq % tp:
        near = multiples_near(model.seq, tp)
        yield f"sequence_parallel: mesh.tp {tp} does not divide model.seq {model.seq}: use {near}"
    if model.vocab < tp:
        yield f"mesh.tp {tp} is more than model.vocab {model.vocab}: set it to {model.vocab} at most"
