"""Check that the tensor, context and uneven axes of a mesh divide a model and its batches, and name sizes that fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from raypar.actors.context_parallel.sequence import num_pieces
from raypar.actors.mesh.grid import grid_of
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import GPT, Layers, Llama
from raypar.actors.specs.optim import OptimizerSettings
from raypar.actors.specs.run import Run
from raypar.config.conflicts.named_settings import (
    CONTEXT,
    DIVIDED_SEQUENCE,
    EP,
    EXPERT_ACTORS,
    EXPERTS,
    FAILURES,
    GRID,
    OFFLOAD,
    OVERFLOW,
    OWN_LAYERS,
    RANK_TP,
    RECHECK,
    REPLICAS,
    SEQUENCE,
    SERVERS,
    TENSOR,
    TIED,
    UNEVEN,
)
from raypar.config.rules import Conflict, Examined, RunRule, RunSetting, builds

_ENDS = RunSetting("mesh.rank_tp", lambda counts: counts[:1] != counts[-1:])


def heads_near(heads: int, ways: int, hidden: int) -> str:
    """Name the multiples of ``ways`` closest to a number of heads, each with a hidden size that it divides.

    Args:
        heads: Number of attention heads.
        ways: The number that must divide the heads.
        hidden: The model's hidden size. The suggested hidden sizes are the closest to it.

    Returns:
        A phrase for a message, such as "6 heads with model.hidden 30 or 9 heads with model.hidden 36".
    """
    below = heads // ways * ways
    return " or ".join(_of(near, hidden) for near in (below, below + ways) if near)


def multiples_near(size: int, ways: int) -> str:
    """Name the multiples of ``ways`` just below and above a size, such as "6 or 9"."""
    below = size // ways * ways
    return " or ".join(str(fit) for fit in (below, below + ways) if fit)


def divisors_near(number: int, whole: int) -> str:
    """Name the divisors of ``whole`` just below and above a number, such as "2 or 4"."""
    below = next(fit for fit in range(min(number, whole), 0, -1) if whole % fit == 0)
    above = next((fit for fit in range(number + 1, whole + 1) if whole % fit == 0), below)
    return " or ".join(str(fit) for fit in sorted({below, above}))


def _of(heads: int, hidden: int) -> str:
    nearest = max(1, round(hidden / heads)) * heads
    return f"{heads} heads" if nearest == hidden else f"{heads} heads with model.hidden {nearest}"


def idle_fields(run: Run) -> Iterator[str]:
    """Yield the fields that have no effect: perhaps mistakes, but the run can start."""
    if run.sequence_parallel and run.mesh.tensor_ranks == 1:
        yield "sequence_parallel has no effect without mesh.tp: give mesh.tp, or leave it out"
    if run.context != "ring" and run.mesh.cp == 1:
        yield f"context {run.context!r} has no effect without mesh.cp: give mesh.cp, or leave it out"
    if run.eval_every and isinstance(run.data, Batches) and run.data.validate is None:
        yield f"eval_every {run.eval_every} has no effect without Batches(validate=...): give one, or leave it out"
    if run.early_stop and not run.eval_every:
        yield f"early_stop {run.early_stop} has no effect without eval_every: give it, or leave early_stop out"
    if run.micro_batch_size != Run.micro_batch_size and isinstance(run.data, Batches):
        text = f"micro_batch_size {run.micro_batch_size} has no effect with Batches, whose function decides"
        yield f"{text} how many samples a microbatch has: leave it out"
    if isinstance(run.optim, OptimizerSettings) and run.optim.warmup > run.steps:
        text = f"optim.warmup is {run.optim.warmup} steps, and steps is {run.steps}"
        yield f"{text}: the learning rate never reaches optim.lr; give less warmup, or more steps"
    falls = run.optim.decay_steps if isinstance(run.optim, OptimizerSettings) and run.optim.decay == "wsd" else None
    if falls is not None and falls > run.steps:
        text = f"optim.decay_steps is {falls} steps, and steps is {run.steps}"
        yield f"{text}: the learning rate falls right after its warm-up; give fewer, or more steps"
    if not run.max_failures:
        names = ("spares", "snapshot_every", "buddy_every", "min_dp")
        for name, value in ((name, getattr(run, name)) for name in names):
            if value != getattr(Run, name):
                yield f"{name} {value} has no effect without max_failures: give max_failures, or leave it out"
    elif not run.snapshot_every and run.buddy_every not in (0, Run.buddy_every):
        yield f"buddy_every {run.buddy_every} has no effect with snapshot_every 0: give snapshot_every, or leave it out"


def _context_faults(examined: Examined) -> Iterator[str]:
    """Yield the reasons why a model's sequences cannot be divided over the context-parallel axis."""
    run, model, mesh = examined.run, examined.run.model, examined.run.mesh
    context, cp = run.context, mesh.cp
    if cp == 1 or isinstance(model, Layers):
        return
    if model.seq % (pieces := num_pieces(context, cp)):
        what = f"mesh.cp {cp}: context {context!r} cuts a sequence into {pieces} pieces"
        yield f"{what}, but model.seq is {model.seq}: set model.seq to {multiples_near(model.seq, pieces)}"
    elif run.sequence_parallel and mesh.grid is None and model.seq // cp % mesh.tensor_ranks:
        whole = pieces * mesh.tensor_ranks
        yield (
            f"sequence_parallel: mesh.cp x mesh.tp = {cp * mesh.tensor_ranks} does not divide model.seq {model.seq}: "
            f"set model.seq to {multiples_near(model.seq, whole)}"
        )
    if context == "ulysses":
        yield from _head_faults(model, cp, mesh.tensor_ranks if mesh.grid is None else mesh.grid.side)


def _head_faults(model: GPT | Llama, cp: int, tp: int) -> Iterator[str]:
    """Yield the reasons why Ulysses cannot divide the heads.

    Args:
        model: The model.
        cp: Number of context ranks.
        tp: Number of parts into which tensor parallelism has divided the heads already; for a grid its side.
    """
    if model.heads % (cp * tp):
        yield (
            f"context 'ulysses' divides heads: mesh.cp x mesh.tp = {cp * tp} does not divide model.heads "
            f"{model.heads}: use {heads_near(model.heads, cp * tp, model.hidden)}, or context 'ring'"
        )
    here = max(1, model.num_kv_heads // tp)
    if model.num_kv_heads != model.heads and here % cp and cp % here:
        yield (
            f"context 'ulysses': a tensor rank has {here} heads of keys and values, and mesh.cp is {cp}: one must "
            "divide the other: change model.kv_heads, or use context 'ring'"
        )


def _grid_faults(model: GPT | Llama, tp: str) -> Iterator[str]:
    """Yield the reasons why a model cannot be divided over a tensor-parallel grid, such as "2d:2x2".

    The vocabulary need not be a multiple of anything.
    """
    grid, named = grid_of(tp), f"mesh.tp is {tp!r}"
    if model.heads % grid.side:
        near = heads_near(model.heads, grid.side, model.hidden)
        yield f"{named}, but {grid.side} does not divide model.heads {model.heads}: use {near}"
    inputs = grid.side**2 if grid.kind == "3d" else grid.side  # number of parts of a matrix's input dim
    fields = ("num_kv_heads", "hidden", "mlp_width") if isinstance(model, Llama) else ("hidden",)
    for field in fields:
        size, parts = getattr(model, field), grid.side if field == "num_kv_heads" else inputs
        if size % parts:
            near = multiples_near(size, parts)
            name = {"num_kv_heads": "kv_heads", "mlp_width": "ffn"}.get(field, field)
            yield f"{named}, but {parts} does not divide model.{name} {size}: set model.{name} to {near}"
    if model.vocab < grid.side:
        fix = f"set model.vocab to {grid.side} at least"
        yield f"{named}, but model.vocab {model.vocab} is less than {grid.side}: {fix}"


def _sample_faults(examined: Examined) -> Iterator[str]:
    """Yield a fault if a grid cannot divide the samples of a microbatch. Of own batches, only the first is checked."""
    run, data, tp = examined.run, examined.run.data, examined.run.mesh.tp
    if not isinstance(tp, str):
        return
    parts = grid_of(tp).batch_parts
    what = f"of which mesh.tp {tp!r} can't make {parts} equal parts"
    if not isinstance(data, Batches):
        if (samples := run.micro_batch_size) % parts:
            yield f"micro_batch_size is {samples}, {what}: set it to {multiples_near(samples, parts)}"
        return
    for name, fn in (("data.fn", data.fn), ("data.validate", data.validate)):
        try:
            batch: Any = fn(0, 0, 0) if fn is not None else ()
            sizes = {len(value) for values in batch for value in (values if isinstance(values, tuple) else (values,))}
        except Exception:  # here its files may be missing; an actor reports the error with its traceback
            continue
        for size in sorted(size for size in sizes if size % parts):
            yield f"{name} returns {size} samples, {what}: return {multiples_near(size, parts)}"


def _tensor_faults(examined: Examined) -> Iterator[str]:
    """Yield the reasons why a model cannot be divided over the tensor-parallel axis."""
    run, model, tp = examined.run, examined.run.model, examined.run.mesh.tp
    if tp == 1:
        return
    if isinstance(model, Layers):
        if not isinstance(tp, str) and not model.plan:
            usual = "give Layers(plan={name of a module: style}), as help(raypar.Layers) says, or set it to 1"
            fix = _plan(examined) or usual
            yield f"mesh.tp is {tp}, but raypar does not know how to divide your own layers: {fix}"
    elif isinstance(tp, str):
        yield from _grid_faults(model, tp)
    else:
        yield from divided_faults(model, tp)
        if run.sequence_parallel and model.seq % tp:
            near = multiples_near(model.seq, tp)
            yield f"sequence_parallel: mesh.tp {tp} does not divide model.seq {model.seq}: use {near}"


def _plan(examined: Examined) -> str:
    """Return a plan to give for own layers that have none; "" where they do not build."""
    if not builds(examined.whole):
        return ""
    from raypar.actors.models.own.user_plan import plan_to_give  # imports torch

    return plan_to_give(examined.whole.layers, examined.run.mesh.tensor_ranks)


def divided_faults(model: GPT | Llama, tp: int, named: str = "mesh.tp") -> Iterator[str]:
    """Yield the reasons why the sizes of a model cannot be divided over tensor ranks.

    The vocabulary need not be a multiple of ``tp``.

    Args:
        model: The model.
        tp: Number of tensor ranks, 2 or more.
        named: The field that sets their number.
    """
    if model.heads % tp:
        near = heads_near(model.heads, tp, model.hidden)
        fewer = next(fewer for fewer in range(tp - 1, 0, -1) if model.heads % fewer == 0)
        yield f"{named} {tp} does not divide model.heads {model.heads}: use {near}, or set {named} to {fewer}"
    if model.num_kv_heads != model.heads and model.num_kv_heads % tp and tp % model.num_kv_heads:
        fewer = max(kv for kv in range(1, tp) if tp % kv == 0)
        yield f"{named} {tp}, model.kv_heads {model.num_kv_heads}: one must divide the other, use {fewer} or {tp}"
    if model.expert_width < tp:
        yield f"{named} {tp} is more than the width {model.expert_width} of an expert: set it to that at most"
    if isinstance(model, Llama) and model.mlp_width % tp:
        yield f"{named} {tp} does not divide model.ffn {model.mlp_width}: use {multiples_near(model.mlp_width, tp)}"
    if model.vocab < tp:
        yield f"{named} {tp} is more than model.vocab {model.vocab}: set it to {model.vocab} at most"


_BLOCKS = RunSetting(
    "run", lambda run: run.mesh.cp > 1 and run.context not in ("ulysses", "rsa"), "context is {run.context!r}"
)


_CAP = RunSetting("model.attention_cap")


_CAPPED = "which computes attention in blocks, and model.attention_cap changes every score"


_UNCAPPED = "use context 'ulysses' or 'rsa', or set mesh.cp to 1"


_ONE_AXIS = "set it to {run.mesh.tensor_ranks}, or model.moe to None"


PARALLEL_RULES: tuple[RunRule, ...] = (
    Conflict(TENSOR, SERVERS, "but servers hold whole weights", SERVERS.undo),
    Conflict(GRID, OWN_LAYERS, "but own layers are divided by a plan, over a number of actors", "set it to 2, say"),
    Conflict(DIVIDED_SEQUENCE, OWN_LAYERS, "but raypar does not know where the sequence of own layers is"),
    Conflict(DIVIDED_SEQUENCE, GRID, "but {other}, which divides norms and dropout already", DIVIDED_SEQUENCE.undo),
    Conflict(GRID, EXPERTS, "a grid, over which experts can't be divided", _ONE_AXIS),
    _tensor_faults,
    _sample_faults,
    Conflict(CONTEXT, OWN_LAYERS, "but the user's own Layers can't be divided by tokens, only a GPT or Llama"),
    _context_faults,
    Conflict(_BLOCKS, _CAP, _CAPPED, _UNCAPPED),
)


def turn_faults(run: Run) -> Iterator[str]:
    """Yield why the replicas of a pipeline rank can't take the microbatches of a step in turn.

    Args:
        run: The run, whose mesh and microbatches have their declared types and ranges.
    """
    least = math.lcm(1, *run.mesh.rank_dp)
    if run.microbatches % least:
        each = -(-run.microbatches // least) * least
        why = f"mesh.rank_dp is {run.mesh.rank_dp}, and as many replicas take a step's microbatches in turn"
        yield f"microbatches is {run.microbatches}, but {why}: set it to {each}, or to another multiple of {least}"


def _width_faults(examined: Examined) -> Iterator[str]:
    """Yield why a model cannot be divided over the tensor ranks of each pipeline rank."""
    run = examined.run
    if isinstance(run.model, Layers):
        return
    for tp in sorted({*run.mesh.rank_tp} - {1}):
        yield from divided_faults(run.model, tp, "mesh.rank_tp")


_REASONS = {
    RunSetting("zero"): "every replica of a rank updates all its weights",
    SERVERS: "there are no servers",
    OFFLOAD: "weights stay on the device",
    SEQUENCE: "stages pass whole sequences",
    FAILURES: "a run ends with its first failure",
    RECHECK: "no other actor computes a microbatch again",
    OVERFLOW: "overflow is not counted",
    EXPERTS: "replicas that take microbatches in turn do not sum the loads of their experts",
}


_EACH = "leave one out, or give it for each rank as mesh.rank_"


_FIXES = {REPLICAS: f"{_EACH}dp", TENSOR: f"{_EACH}tp", **dict.fromkeys((CONTEXT, EP, EXPERT_ACTORS), "leave one out")}


_FOR_ALL = "which is for all ranks, and does not combine with {other}"


UNEVEN_RULES: tuple[RunRule, ...] = (
    *(Conflict(one, axis, _FOR_ALL, fix) for one, fix in _FIXES.items() for axis in UNEVEN),
    *(Conflict(one, axis, f"but with {{other}} {why}") for one, why in _REASONS.items() for axis in UNEVEN),
    lambda examined: turn_faults(examined.run),
    Conflict(OWN_LAYERS, RANK_TP, "but with {other} each rank divides layers in its own way"),
    _width_faults,
    Conflict(_ENDS, TIED, "but model.tied ties weights of the first rank to the last one, which are divided otherwise"),
)
