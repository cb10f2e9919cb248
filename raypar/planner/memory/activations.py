"""How many bytes of activations a pipeline rank keeps at the most, estimated before a run starts.

Activations are what a forward keeps for its backward, by the formula of Korthikanti et al. 2022 (equation 2), counted
in elements as CPUs keep them: with s tokens, b samples, h hidden and a heads a block of a GPT keeps 16 sbh, and
2 sbh more with dropout, a block of a Llama 2 sbh more for its norms; of scores a s^2 b where they are kept at all, 3 of
them with dropout. An element has the dtype of the layers, but the softmax, what Llama's norms keep and logits are fp32.
In half precision there is a rounded copy of the softmax. Also counted are the means and deviations of norms, the
mask of materialised scores, and an actor's tables of rotary positions. tests/raypar/planner/test_kept_exactly.py counts
what modules keep. Tensors freed within an action are left out, except those of a recomputation and the logits.

A backward in halves frees at I what its F has kept, and keeps for W the inputs of linear layers and the gradients of
their outputs: of a block of a GPT 16 sbh again, of a Llama's less than it has kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.partition import split_layers, transformer_costs
from raypar.actors.models.tiles.tile_names import tile_count, tile_patterns
from raypar.actors.specs.model import (
    BLOCK_TOKENS,
    BLOCKS_FROM_QUERIES,
    BLOCKS_FROM_TOKENS,
    GPT,
    KEPT_SCORES_BYTES,
    Llama,
    vocabulary_slice,
)
from raypar.actors.specs.recompute import word_of
from raypar.actors.specs.run import Run
from raypar.schedules.action import Op
from raypar.schedules.float_sum import float_sum
from raypar.schedules.rules import MAKES_INPUT_GRADIENTS, held_bytes
from raypar.schedules.timeline import Timeline

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_FP32 = ELEMENT_BYTES["fp32"]
_UNEVEN = 2.0  # see ``uneven_load``
_NUMBER = 9  # of a token, and whether it is this rank's


class StageBytes(NamedTuple):
    """Bytes of a stage for one microbatch.

    Attributes:
        kept: What its F keeps for its B or I.
        passing: What its backward needs besides for a while.
        deferred: What its I keeps for its W.
        inputs: What its F keeps that never goes to host memory.
    """

    kept: int
    passing: int
    deferred: int
    inputs: int = 0


def most_kept(run: Run, model: GPT | Llama, timeline: Timeline, *, apart: bool = False) -> list[int]:
    """Return the most bytes of activations that a worker of each pipeline rank keeps at a time.

    Args:
        run: The run.
        model: Its model.
        timeline: The predicted training step, which says how many microbatches are under way.
        apart: Count only the experts of each pipeline rank: those of an expert actor, if there are expert actors.
    """
    if run.mesh.rank_tp:
        schedule, mesh = timeline.schedule, run.mesh
        each_tp = {tp: most_kept(replace(run, mesh=Mesh(pp=mesh.pp, tp=tp)), model, timeline) for tp in {*mesh.rank_tp}}
        return [each_tp[mesh.tp_of(schedule.pipeline_rank_of(row))][row] for row in range(schedule.num_ranks)]
    stages = split_layers(run.split, transformer_costs(model), timeline.schedule.num_stages)
    stage, slices = _experts_apart if apart else stage_activations, timeline.schedule.slices
    wholes = [stage(run, model, layers, num_blocks=model.layers) for layers in stages]
    each = [StageBytes(*(part // slices for part in whole)) for whole in wholes]
    scores = [StageBytes(0, 0, 0) if apart else _scores(run, model, layers) for layers in stages]
    on = [timeline.schedule.stages_of(rank) for rank in range(timeline.num_ranks)]
    tables = [_tables(run, model) if not apart and any(stages[stage] for stage in held) else 0 for held in on]
    parts = zip(_highest(timeline, each), _highest(timeline, scores), tables, strict=True)
    return [tensors + min(in_blocks, KEPT_SCORES_BYTES) + table for tensors, in_blocks, table in parts]


def _tables(run: Run, model: GPT | Llama) -> int:
    """Return the bytes of tables that an actor's blocks share: angles of rotary positions, or biases of ALiBi."""
    if model.positions == "rope":
        return 2 * _FP32 * model.seq * model.head_size
    biases = model.heads * model.seq**2 if model.positions == "alibi" else 0
    return _element(run) * biases // run.mesh.tensor_ranks


def _highest(timeline: Timeline, each: Sequence[StageBytes]) -> list[int]:
    """Return the most bytes of each rank at a time, if its stages keep and need these of a microbatch."""
    now, most = [0] * timeline.num_ranks, [0] * timeline.num_ranks
    for event in timeline.events:
        stage, op, _, _ = event.action
        if stage is None:
            continue
        before, rank = now[event.rank], event.rank
        now[rank] += held_bytes(op, each[stage].kept, each[stage].deferred, each[stage].inputs)
        if op is Op.F:
            most[rank] = max(most[rank], now[rank] + each[stage].passing)
        elif op in MAKES_INPUT_GRADIENTS:
            most[rank] = max(most[rank], now[rank], before + each[stage].passing)
        else:
            most[rank] = max(most[rank], now[rank])
    return most


def _scores(run: Run, model: GPT | Llama, layers: range) -> StageBytes:
    """Return the bytes of scores that attention in blocks makes for a stage's microbatch, where it serves."""
    cp, S = run.mesh.cp, model.seq
    heads = model.heads / run.mesh.tensor_ranks / (cp if run.context == "ulysses" else 1)
    plain = model.attention == "blocks" and not model.dropout and model.positions != "alibi"
    if plain and _is_narrow(model):
        return StageBytes(0, 0, 0)
    if not plain or run.precision.is_half or S < BLOCKS_FROM_TOKENS or heads * S < BLOCKS_FROM_QUERIES:
        return StageBytes(0, 0, 0)
    seen = sum(
        (min(start + BLOCK_TOKENS, S) - start) * min(start + BLOCK_TOKENS, S) for start in range(0, S, BLOCK_TOKENS)
    )
    one = _FP32 * run.micro_batch_size * (model.heads / run.mesh.tensor_ranks / cp) * seen
    words = [word_of(run.recompute, range(model.layers), layer) for layer in layers]
    if run.recompute == "full":
        return StageBytes(0, round(one * len(words)), 0)
    again = words.count("full")
    return StageBytes(round(one * (len(words) - again)), round(one * min(1, again)), 0)


def stage_activations(run: Run, model: GPT | Llama, layers: range, num_blocks: int) -> StageBytes:
    """Return the bytes that a stage keeps and needs of a microbatch."""
    ranks, sbh = run.mesh.tensor_ranks, model.seq * run.micro_batch_size * model.hidden
    element = _element(run)
    words = [word_of(run.recompute, range(num_blocks), layer) for layer in layers]
    kinds = [*zip(words, map(model.num_experts, layers), strict=True)]
    sizes = {kind: (_block(run, model, *kind), _block(run, model, "none", kind[1])) for kind in {*kinds}}
    each = [sizes[kind] for kind in kinds]
    own, head = element * _part(run) * sbh, _head(run, model) if layers.stop == num_blocks else None
    own_numbers = _NUMBER * model.seq * run.micro_batch_size if ranks > 1 else 0  # of those tokens that a rank knows
    ends = (own if model.dropout else 0.0) + own_numbers if layers.start == 0 else 0.0
    if head is not None:
        ends += 2 * own + _norms(run, model, count=1) + head.kept + own_numbers
    kept = float_sum(own for own, _ in each) + ends
    passing = max((full - own for own, full in each), default=0.0)  # a layer run again
    if run.recompute == "full":  # the whole stage is run again from its inputs
        kept, passing = (own if layers.start else 0), float_sum(full for _, full in each) + ends
    left = [experts for word, experts in kinds if run.recompute == "full" or word != "full"]  # blocks that leave a W
    deferred = float_sum(_deferred(run, model, experts) for experts in left)
    if head is not None:
        passing += head.passing
        deferred += own + head.deferred if head.deferred else 0.0
    inputs = own if layers.start else 0.0
    return StageBytes(*(round(part / run.mesh.cp) for part in (kept, passing, deferred, inputs)))


def loss_slice(run: Run, model: GPT | Llama) -> int | None:
    """Return how many ids a slice of the vocabulary has from which a run's loss is computed; None: logits are whole.

    Grids and tiled heads compute whole logits.
    """
    if run.mesh.grid is not None or tile_count(tile_patterns(model, run.tile), "head.out") > 1:
        return None
    return vocabulary_slice(model.seq * run.micro_batch_size / run.mesh.cp / run.token_slices, model.vocab)


class _Head(NamedTuple):
    """Bytes of the logits and losses of a microbatch, of all parts of the sequence; attributes as of ``StageBytes``."""

    kept: float
    passing: float
    deferred: float


def _head(run: Run, model: GPT | Llama) -> _Head:
    """Return the bytes of the head beside its inputs.

    From slices of the vocabulary the loss keeps a number of each token. Its backward needs a slice's logits, in fp32
    and, if layers compute in half precision, in their dtype, with more of their size for a cap; and in half precision
    it adds up the gradient of its input in fp32.
    """
    tokens, ranks, element = model.seq * run.micro_batch_size, run.mesh.tensor_ranks, _element(run)
    own_vocab, is_half, is_capped = model.vocab / ranks, run.precision.is_half, model.logit_cap is not None
    if (width := loss_slice(run, model)) is not None:
        each = _FP32 + (_FP32 + element if is_capped else element * is_half)
        return _Head(_FP32 * tokens, tokens * (each * min(width, own_vocab) + _FP32 * is_half * model.hidden), 0.0)
    logits = tokens * own_vocab
    kept = (_FP32 + element * is_capped) * logits
    # passing: the layers' logits, and the gradient of those in fp32
    return _Head(kept, (_FP32 + element) * logits, element * logits)


def _deferred(run: Run, model: GPT | Llama, num_experts: int) -> float:
    """Return the bytes that the I of a block keeps for its W, of all parts of the sequence.

    They are the inputs of linear layers and the gradients of their outputs; a router leaves nothing.

    Args:
        run: The run.
        model: Its model.
        num_experts: Number of its experts; 0 if it has an MLP.
    """
    ranks, sbh = run.mesh.tensor_ranks, model.seq * run.micro_batch_size * model.hidden
    wide, rows = _mlp_units(model, num_experts, apart=run.mesh.expert_actors > 0, is_deferred=True)
    all_heads, kv = model.heads * model.head_size / model.hidden, model.num_kv_heads / model.heads  # widths, in h
    ends = 2 if num_experts else 4  # what goes into attention and MLP, and the gradients of what comes out of them
    whole = ends / ranks if run.mesh.grid is not None else ends
    own_rows = rows / ranks if run.mesh.folds_experts else rows
    return _element(run) * (whole + own_rows + (all_heads * (2 + 2 * kv) + wide) / ranks) * sbh


def _element(run: Run) -> int:
    """Return the bytes of an element of what layers compute."""
    return ELEMENT_BYTES[run.precision.layers]


def _part(run: Run) -> float:
    """Return the part of a tensor between two layers that a tensor rank has."""
    return 1 / run.mesh.tensor_ranks if run.sequence_parallel or run.mesh.grid is not None else 1.0


def _norms(run: Run, model: GPT | Llama, count: int) -> float:
    """Return the bytes that so many norms keep beside their inputs.

    They are the deviation of every token, and its mean in a LayerNorm, in fp32; RMSNorms keep two tensors in fp32.
    """
    rms = model.has_rms_norms
    beside = (2 * _FP32 - _element(run)) * model.hidden if rms else 0
    return count * _part(run) * model.seq * run.micro_batch_size * (beside + _FP32 * (1 if rms else 2))


def _block(run: Run, model: GPT | Llama, word: str, num_experts: int) -> float:
    """Return the bytes that a block keeps of a microbatch for its backward, of all parts of the sequence.

    Args:
        run: The run.
        model: Its model.
        word: What is recomputed of the block.
        num_experts: Number of its experts; 0 if it has an MLP.
    """
    ranks, tokens, element = run.mesh.tensor_ranks, model.seq * run.micro_batch_size, _element(run)
    sbh, scores = tokens * model.hidden, tokens * model.seq * model.heads
    masks = 2 if model.dropout else 0
    wide, rows = _mlp_units(model, num_experts, apart=run.mesh.expert_actors > 0)
    all_heads, kv = model.heads * model.head_size / model.hidden, model.num_kv_heads / model.heads  # widths, in h
    after = model.norms - 2  # inputs of norms after attention and MLP
    units = 4 + after + all_heads * (2 + 2 * kv) + wide + rows + masks
    if word == "full":
        return element * _part(run) * sbh
    own_rows = 0 if run.mesh.folds_experts else rows  # which every tensor rank has; else they divide tokens
    whole = 0 if run.mesh.grid is not None else own_rows + (2 if run.sequence_parallel else 4 + after + masks)
    kept = element * (whole + (units - whole) / ranks) * sbh + _norms(run, model, count=model.norms)
    if num_experts:
        kept += tokens * _routing(run, model, num_experts) / (1 if own_rows and run.mesh.grid is None else ranks)
    if model.qk_norm:  # two tensors and the deviations, as of other norms
        kept += _FP32 * (2 * model.head_size + 1) * (model.heads + model.num_kv_heads) * tokens / ranks
    if run.mesh.cp > 1 and run.context == "ulysses":
        kept += element * sbh / ranks
    is_materialised = model.dropout or model.attention == "materialised" or (run.mesh.cp > 1 and run.context == "rsa")
    if not is_materialised:  # sums of the softmax; what comes out of turned queries, by head too; windows
        kept += (_FP32 * model.heads * tokens + element * (all_heads * sbh if model.positions == "rope" else 0)) / ranks
        if _is_narrow(model):
            kept += element * model.seq**2 * (model.heads / ranks if model.positions == "alibi" else 1)
    if word == "selective":
        return kept
    if is_materialised:
        beside = 2 if model.dropout else int(run.precision.is_half)  # scores in the layers' dtype beside the softmax
        bent = model.attention_cap is not None  # which keeps another tensor of their size
        kept += (_FP32 * (2 if bent else 1) + beside * element) * scores / ranks
    if model.attention == "materialised" and model.positions != "alibi" and not _is_narrow(model):
        kept += model.seq**2  # which scores are seen, one byte each
    return kept


def _routing(run: Run, model: GPT | Llama, num_experts: int) -> float:
    """Return the bytes that a router keeps for each token, in fp32 but for the numbers of experts, which are int64."""
    moe = model.moe
    assert moe is not None
    probabilities = (3 if moe.gate == "shazeer" else 1) + (moe.z_loss > 0)  # with its noise, and logits
    sums = (moe.top_k + 1) * (moe.normalises and moe.gate != "shazeer") + (moe.gate == "sigmoid")
    jitter = (2 if moe.residual or moe.shared else 1) * (moe.gate == "switch" and moe.noise > 0)
    inputs = model.hidden * (run.precision.is_half + jitter)
    each = probabilities * num_experts + 3 * moe.top_k + sums + (moe.loss == "gshard") + 2 * moe.residual
    return _FP32 * (each + inputs)


def _is_narrow(model: GPT | Llama) -> bool:
    """Return whether blocks have a window that is shorter than a sequence."""
    return model.window is not None and model.window < model.seq


def _experts_apart(run: Run, model: GPT | Llama, layers: range, num_blocks: int) -> StageBytes:
    """Return the bytes that an actor keeps and needs of a microbatch for its experts.

    Of each row that comes to it, at an even load, it keeps the row itself and what is inside of the expert's MLP.
    """
    assert model.moe is not None
    mesh = run.mesh
    senders = mesh.dp / mesh.expert_actors if mesh.expert_actors else 1 / mesh.cp
    if mesh.folds_experts and not mesh.expert_actors:
        senders *= mesh.expert_ranks / mesh.tensor_ranks
    rows = model.seq * run.micro_batch_size * model.moe.top_k * senders
    one = _element(run) * rows * (model.hidden + _inside(model) * model.expert_width)
    left = _element(run) * rows * (2 * model.hidden + _inside(model, is_deferred=True) * model.expert_width)
    words = [word_of(run.recompute, range(num_blocks), layer) for layer in layers if model.num_experts(layer)]
    again = one * (len(words) if run.recompute == "full" else min(1, words.count("full")))
    num_left = len(words) if run.recompute == "full" else len(words) - words.count("full")
    return StageBytes(round(one * (len(words) - words.count("full"))), round(again), round(left * num_left))


def uneven_load(run: Run, model: GPT | Llama) -> float:
    """Return the assumed largest load of an actor's experts, as a multiple of an even load.

    The routing of tokens is not known before. The factor is 2, or less if fewer rows can come. With two
    parts of four experts, of which a token chose two, an actor kept up to 1.9 times as much in the first ten steps.
    """
    moe, mesh = model.moe, run.mesh
    if moe is None or mesh.ep == 1:
        return 1.0
    held = max(mesh.held_experts(model.num_experts(block)) for block in range(model.layers))
    return max(1.0, min(_UNEVEN, mesh.ep * min(moe.top_k, held) / moe.top_k, moe.capacity or _UNEVEN))


def _inside(model: GPT | Llama, *, is_deferred: bool = False) -> int:
    """Return how many tensors inside of an MLP an F keeps, or an I for its W."""
    return 2 if not model.is_gated else 3 if is_deferred else 4


def _mlp_units(model: GPT | Llama, num_experts: int, *, apart: bool, is_deferred: bool = False) -> tuple[float, float]:
    """Return what an MLP or experts keep, in units of sbh: inside of MLPs, and rows of tokens.

    Of experts that are ``apart``, on actors of their own, only what comes out of them is kept; and of what is deferred
    to a W, nothing.
    """
    inside, h, moe = _inside(model, is_deferred=is_deferred), model.hidden, model.moe
    if moe is None or not num_experts:
        return inside * model.mlp_width / h, 0.0
    width = model.expert_width * ((0 if apart else moe.top_k) + moe.shared) + (model.mlp_width if moe.residual else 0)
    rows = (1 if apart else 2) * moe.top_k + (2 if moe.residual else 0)  # what goes into experts and comes out of them
    return inside * width / h, rows - (moe.top_k if apart and is_deferred else 0)
