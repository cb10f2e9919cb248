"""What can be wrong with dividing a model over the tensor-parallel axis."""

from __future__ import annotations

from collections.abc import Iterator

from raypar.actors.specs import GPT, Layers, Llama
from raypar.actors.world import DataParallel


def tensor_faults(
    model: GPT | Llama | Layers, tp: int, data_parallel: DataParallel, *, sequence: bool
) -> Iterator[str]:
    """Everything that keeps a model from being divided ``tp`` ways; a vocabulary need not be a multiple, and what
    is a multiple of the heads is one of ``tp`` too. A plan of the user's is checked with the modules, which need torch.
    """
    if tp == 1:
        return
    if data_parallel == "parameter_server":
        yield f"mesh.tp is {tp}, but servers hold whole weights: set data_parallel to 'all_reduce', zero=1 works too"
    if isinstance(model, Layers):
        if not model.plan:
            yield (
                f"mesh.tp is {tp}, but of your own layers it is not known how to divide them: "
                'give Layers(plan={"layers.*.up": "column", "layers.*.down": "row"}), say, or set it to 1'
            )
        if sequence:
            yield "sequence_parallel: of your own layers it is not known where the sequence is: set it to False"
        return
    if model.heads % tp:
        below = model.heads // tp * tp
        near = " or ".join(_of(heads, model.hidden) for heads in (below, below + tp) if heads)
        fewer = next(fewer for fewer in range(tp - 1, 0, -1) if model.heads % fewer == 0)
        yield f"mesh.tp {tp} does not divide model.heads {model.heads}: use {near}, or set mesh.tp to {fewer}"
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        fewer = max(kv for kv in range(1, tp) if tp % kv == 0)
        yield f"mesh.tp {tp}, model.kv_heads {model.num_kv_heads}: one must divide the other, use {fewer} or {tp}"
    if isinstance(model, Llama) and model.mlp_width % tp:
        yield f"mesh.tp {tp} does not divide model.ffn {model.mlp_width}: use {_near(model.mlp_width, tp)}"
    if sequence and model.seq % tp:
        yield f"sequence_parallel: mesh.tp {tp} does not divide model.seq {model.seq}: use {_near(model.seq, tp)}"
    if model.vocab < tp:
        yield f"mesh.tp {tp} is more than model.vocab {model.vocab}: set it to {model.vocab} at most"


def _of(heads: int, hidden: int) -> str:
    """So many heads, and the hidden size next to ``hidden`` that they divide."""
    nearest = max(1, round(hidden / heads)) * heads
    return f"{heads} heads" if nearest == hidden else f"{heads} heads with model.hidden {nearest}"


def _near(size: int, tp: int) -> str:
    """The multiples of ``tp`` next to a size."""
    below = size // tp * tp
    return " or ".join(str(fit) for fit in (below, below + tp) if fit)
