"""What is wrong with axes that are given to a search: no layout of the devices has them, whatever the rest is."""

from __future__ import annotations

import math
from collections.abc import Iterator

from raypar.actors.specs.model import GPT, Llama
from raypar.planner.search.space import MOST_CELLS, Space, tensor_ranks


def axis_faults(model: GPT | Llama, size: int, space: Space) -> Iterator[str]:
    """Yield which of the given axes, and which batch, fit no layout, each with its fix.

    Args:
        model: The model.
        size: Number of devices.
        space: What to choose from; an axis that is given has one number.
    """
    axes = {"tp": space.tp, "pp": space.pp, "cp": space.cp}
    given = {axis: counts[0] for axis, counts in axes.items() if counts}
    beyond = [axis for axis, count in given.items() if size % count]
    for axis in beyond:
        yield f"--mesh.{axis} {given[axis]} does not divide {size:,} devices: give a divisor, or leave it out"
    if not beyond and size % (ranks := math.prod(given.values())):
        axes_text = " ".join(f"--mesh.{axis} {count}" for axis, count in given.items())
        yield f"{axes_text} make {ranks} ranks, which do not divide {size:,} devices: leave one of them out"
    tp, pp, cp = (given.get(axis, 1) for axis in axes)
    if tp not in tensor_ranks(model, tp, tp):
        widths = f"{model.heads} heads, {model.num_kv_heads} of keys, and an MLP of {model.mlp_width}"
        yield f"--mesh.tp {tp} does not divide {widths}: give a common divisor, or leave it out"
    if pp > model.layers:
        yield f"--mesh.pp {pp} is more than the {model.layers} layers: give {model.layers} at most, or leave it out"
    if cp > 1 and model.seq % (2 * cp):
        yield f"--mesh.cp {cp} does not cut {model.seq} tokens into 2 x {cp} parts: give another one, or leave it out"
    counts = {model.num_experts(block) for block in range(model.layers)} - {0}
    for ep in space.ep or ():
        if ep > 1 and not counts:
            yield f"--mesh.ep {ep} divides experts, and the model has none: leave it out"
        elif any(count % ep for count in counts):
            yield f"--mesh.ep {ep} does not divide {' and '.join(map(str, sorted(counts)))} experts: give a divisor"
    if space.batch > (most := space.samples * MOST_CELLS * size):
        yield f"a step of {space.batch:,} sequences is more than the {most:,} that are planned: use a smaller --batch"
