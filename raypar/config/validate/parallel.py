"""Check that a model and its batches can be divided over the tensor-parallel and context-parallel axes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raypar.actors.context_parallel.sequence import num_pieces
from raypar.actors.mesh.grid import grid_of
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import GPT, Layers, Llama
from raypar.actors.specs.optim import OptimizerSettings
from raypar.actors.specs.run import Run
from raypar.config.rules import Conflict, Examined, RunRule, RunSetting, builds
from raypar.config.validate.model import heads_near, multiples_near
from raypar.config.validate.settings import CONTEXT, DIVIDED_SEQUENCE, EXPERTS, GRID, OWN_LAYERS, SERVERS, TENSOR


def idle_fields(run: Run) -> Iterator[str]:
    """Yield what a run asks for without effect: a mistake, perhaps, but none that keeps it from starting."""
    if run.sequence_parallel and run.mesh.tensor_ranks == 1:
        yield "sequence_parallel has no effect without mesh.tp: give mesh.tp, or leave it out"
    if run.context != "ring" and run.mesh.cp == 1:
        yield f"context {run.context!r} has no effect without mesh.cp: give mesh.cp, or leave it out"
    if run.eval_every and isinstance(run.data, Batches) and run.data.validate is None:
        yield f"eval_every {run.eval_every} has no effect without Batches(validate=...): give one, or leave it out"
    if run.early_stop and not run.eval_every:
        yield f"early_stop {run.early_stop} has no effect without eval_every: give it, or leave early_stop out"
    if run.micro_batch_size != Run.micro_batch_size and isinstance(run.data, Batches):
        told = f"micro_batch_size {run.micro_batch_size} has no effect with Batches, whose function decides"
        yield f"{told} how many samples a microbatch has: leave it out"
    if isinstance(run.optim, OptimizerSettings) and run.optim.warmup > run.steps:
        told = f"optim.warmup is {run.optim.warmup} steps, and steps is {run.steps}"
        yield f"{told}: the learning rate never reaches optim.lr; give less warmup, or more steps"
    falls = run.optim.decay_steps if isinstance(run.optim, OptimizerSettings) and run.optim.decay == "wsd" else None
    if falls is not None and falls > run.steps:
        told = f"optim.decay_steps is {falls} steps, and steps is {run.steps}"
        yield f"{told}: the learning rate falls right after its warm-up; give fewer, or more steps"
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
    if isinstance(model, Llama) and model.num_kv_heads % grid.side:
        near = multiples_near(model.num_kv_heads, grid.side)
        fix = f"set model.kv_heads to {near}"
        yield f"{named}, but {grid.side} does not divide model.kv_heads {model.num_kv_heads}: {fix}"
    inputs = grid.side**2 if grid.kind == "3d" else grid.side  # number of parts of a matrix's input dim
    if model.hidden % inputs:
        near = multiples_near(model.hidden, inputs)
        yield f"{named}, but {inputs} does not divide model.hidden {model.hidden}: set model.hidden to {near}"
    if isinstance(model, Llama) and model.mlp_width % inputs:
        near = multiples_near(model.mlp_width, inputs)
        yield f"{named}, but {inputs} does not divide model.ffn {model.mlp_width}: set model.ffn to {near}"
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
            usual = "give Layers(plan={name of a module: style}), as help(raypar.Layers) tells, or set it to 1"
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
    from raypar.actors.models.user_plan import plan_to_give  # imports torch

    return plan_to_give(examined.whole.layers, examined.run.mesh.tensor_ranks)


def divided_faults(model: GPT | Llama, tp: int, named: str = "mesh.tp") -> Iterator[str]:
    """Yield the reasons why the sizes of a model cannot be divided over tensor ranks.

    The vocabulary need not be a multiple of ``tp``.

    Args:
        model: The model.
        tp: Number of tensor ranks, 2 or more.
        named: The field that says so.
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
