"""The layouts that a search looks at: every run that divides a batch, a model and a cluster evenly.

What is wrong with axes that are given to a search: no layout of the devices has them, whatever the rest is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.mesh.world import Zero
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.recompute import Recompute, Word
from raypar.actors.specs.run import Run

LARGEST_MICROBATCH = 16
MOST_CELLS = 50_000  # microbatches x stages of a schedule that raypar performs
LONG = 8192  # tokens of a sequence from which on context ranks are looked at
_CHUNKS = (2, 3, 4, 5, 6, 8)
_BUCKET = 128.0  # MiB, so that a network's latency is small beside the bytes


@dataclass(frozen=True)
class Space:
    """What a search may choose from.

    Attributes:
        batch: Sequences of a step of all replicas.
        tp: Tensor ranks; None: those that divide heads and a node.
        pp: Pipeline ranks; None: all.
        cp: Context ranks; None: 1, and more for long sequences.
        ep: Parts into which experts are divided; None: all divisors of their number.
        zero: Levels of ZeRO where there are replicas; level 1 does all that 0 does, with less.
        recompute: What backwards compute again.
        schedules: Names of schedules: 1f1b, interleaved, zb-v.
        sequence_parallel: Whether tensor ranks divide norms too, wherever they can.
        samples: The largest microbatch.
        even: Whether all stages must have as many layers, and rounds of interleaved ones be full.
    """

    batch: int
    tp: Sequence[int] | None = None
    pp: Sequence[int] | None = None
    cp: Sequence[int] | None = None
    ep: Sequence[int] | None = None
    zero: Sequence[Zero] = (1, 2, 3)
    recompute: Sequence[Word] = ("none", "selective", "full")
    schedules: Sequence[str] = ("1f1b", "interleaved", "zb-v")
    sequence_parallel: bool = True
    samples: int = LARGEST_MICROBATCH
    even: bool = False


def divisors(count: int) -> list[int]:
    """Return the divisors of a number, in rising order."""
    small = [one for one in range(1, int(count**0.5) + 1) if count % one == 0]
    return small + [count // one for one in reversed(small) if one * one != count]


def meshes(run: Run, model: GPT | Llama, gpus: int, each_node: int, space: Space) -> Iterator[Mesh]:
    """Yield the meshes of so many actors that divide the model and the batch evenly."""
    for tp in space.tp or tensor_ranks(model, gpus, each_node):
        if tp not in tensor_ranks(model, gpus, gpus):
            continue
        for cp in space.cp or context_ranks(model, gpus // tp):
            pieces = tp if cp == 1 else 2 * cp * tp  # a ring cuts each part in two
            if gpus % (tp * cp) or model.seq % pieces:
                continue
            for pp in space.pp or divisors(gpus // (tp * cp)):
                dp, rest = divmod(gpus, tp * cp * pp)
                if rest or pp > model.layers or space.batch % dp:
                    continue
                for ep in _expert_parts(model, dp * cp * tp, space):
                    yield Mesh(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, etp=1 if ep > 1 and tp > 1 else None)


def tensor_ranks(model: GPT | Llama, gpus: int, each_node: int) -> list[int]:
    """Return the numbers of tensor ranks of a node that divide heads, keys and the MLP.

    Args:
        model: The model.
        gpus: Number of devices, which they divide too.
        each_node: Devices of a node.
    """
    fits = [tp for tp in divisors(gpus) if tp <= each_node and model.heads % tp == 0 and model.mlp_width % tp == 0]
    return [tp for tp in fits if model.num_kv_heads % tp == 0 or tp % model.num_kv_heads == 0]


def context_ranks(model: GPT | Llama, gpus: int) -> list[int]:
    """Return the numbers of context ranks that leave each one enough tokens."""
    return [1] + [cp for cp in (2, 4, 8, 16, 32) if model.seq // cp >= LONG // 2 and gpus % cp == 0]


def _expert_parts(model: GPT | Llama, inner: int, space: Space) -> list[int]:
    """Return the numbers of parts into which experts of every layer with some can be divided."""
    counts = {model.num_experts(block) for block in range(model.layers)} - {0}
    if not counts:
        return [1]
    parts = space.ep or divisors(min(counts))
    return [ep for ep in parts if inner % ep == 0 and all(count % ep == 0 for count in counts)]


def schedules_of(model: GPT | Llama, mesh: Mesh, space: Space) -> Iterator[tuple[str, int | None]]:
    """Yield names of schedules, and the stages of a rank, that fit a mesh."""
    if mesh.pp == 1:
        yield "1f1b", None
        return
    for name in space.schedules:
        if name == "interleaved":
            for chunks in _CHUNKS:
                if mesh.pp * chunks <= model.layers:
                    yield name, chunks
        elif name != "zb-v" or 2 * mesh.pp <= model.layers:
            yield name, 2 if name == "zb-v" else None


def runs_on(run: Run, model: GPT | Llama, mesh: Mesh, space: Space) -> Iterator[Run]:
    """Yield the runs on a mesh, without recomputation and ZeRO, which come after."""
    each = space.batch // mesh.dp
    samples = 1
    while samples <= space.samples and each % samples == 0:
        for name, chunks in schedules_of(model, mesh, space):
            m, stages = each // samples, mesh.pp * (chunks or 1)
            if m * stages > MOST_CELLS:
                continue
            if space.even and (model.layers % stages or (name == "interleaved" and m % mesh.pp)):
                continue
            yield replace(
                run,
                mesh=mesh,
                schedule=name,
                chunks=chunks,
                microbatches=m,
                micro_batch_size=samples,
                sequence_parallel=space.sequence_parallel and mesh.tp != 1,
                context="ring",
                zero_reduce=None,
                bucket_mb=max(run.bucket_mb, _BUCKET),
                backward="whole",
            )
        samples *= 2


def sparing(run: Run, model: GPT | Llama, space: Space) -> Iterator[Run]:
    """Yield a run with every way of sparing memory, those first that cost least time."""
    scores = model.attention == "materialised" or model.dropout > 0
    for word in space.recompute:
        if word == "selective" and not scores:  # a fused attention keeps none
            continue
        recompute: Recompute = (word,) * model.layers if word == "full" else word
        for zero in space.zero if run.mesh.shards > 1 else (0,):
            yield replace(run, recompute=recompute, zero=zero)


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
