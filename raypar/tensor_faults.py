"""What can be wrong with dividing a model over the tensor-parallel axis."""

from __future__ import annotations

from collections.abc import Iterator

from raypar.actors.specs import GPT, Layers
from raypar.actors.world import DataParallel


def tensor_faults(model: GPT | Layers, tp: int, data_parallel: DataParallel, *, sequence: bool) -> Iterator[str]:
    """Everything that keeps a model from being divided ``tp`` ways; a vocabulary need not be a multiple, and what
    is a multiple of the heads is one of ``tp`` too."""
    if tp == 1:
        return
    if data_parallel == "parameter_server":
        yield f"mesh.tp is {tp}, but servers hold whole weights: set data_parallel to 'all_reduce', zero=1 works too"
    if isinstance(model, Layers):
        yield f"mesh.tp is {tp}: the user's own Layers can't be divided yet, only a GPT: set it to 1"
        return
    if model.heads % tp:
        below = model.heads // tp * tp
        near = " or ".join(_of(heads, model.hidden) for heads in (below, below + tp) if heads)
        fewer = next(fewer for fewer in range(tp - 1, 0, -1) if model.heads % fewer == 0)
        yield f"mesh.tp {tp} does not divide model.heads {model.heads}: use {near}, or set mesh.tp to {fewer}"
    if sequence and model.seq % tp:
        near = " or ".join(str(seq) for seq in (model.seq // tp * tp, -(-model.seq // tp) * tp) if seq)
        yield f"sequence_parallel: mesh.tp {tp} does not divide model.seq {model.seq}: make that {near}"
    if model.vocab < tp:
        yield f"mesh.tp {tp} is more than model.vocab {model.vocab}: set it to {model.vocab} at most"


def _of(heads: int, hidden: int) -> str:
    """So many heads, and the hidden size next to ``hidden`` that they divide."""
    nearest = max(1, round(hidden / heads)) * heads
    return f"{heads} heads" if nearest == hidden else f"{heads} heads with model.hidden {nearest}"
