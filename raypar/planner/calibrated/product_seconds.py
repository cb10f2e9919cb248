"""The matrix products of a block and of the head on one actor, in seconds of a calibration."""

from __future__ import annotations

from dataclasses import dataclass

from raypar.actors.specs.model import Transformer
from raypar.actors.specs.run import Run
from raypar.planner.calibrated.calibration import Calibration
from raypar.schedules.float_sum import float_sum


@dataclass(frozen=True)
class MicrobatchSeconds:
    """The seconds of products for a microbatch.

    Attributes:
        forward: Seconds of its forward.
        backward: Seconds of its backward.
        core: The part of the forward that a selective recomputation runs again.
        later: The part of the backward that can be left for W.
    """

    forward: float = 0.0
    backward: float = 0.0
    core: float = 0.0
    later: float = 0.0


def block_products(
    run: Run, model: Transformer, block: int, calibration: Calibration, tp: int = 1
) -> MicrobatchSeconds:
    """Return the seconds of a block's products and attention for a microbatch.

    Args:
        run: The run.
        model: Its model.
        block: Index of the block.
        calibration: The measured products.
        tp: Number of tensor ranks that divide the block.
    """
    rows, hidden, width = _tokens(run, model), model.hidden, model.heads * model.head_size
    keys = model.num_kv_heads * model.head_size
    shapes = [(rows, hidden, (width + 2 * keys) / tp), (rows, width / tp, hidden)]
    experts, moe = model.num_experts(block), model.moe
    if moe is not None and experts:
        local = experts / run.mesh.ep
        share = rows * moe.top_k * run.mesh.ep / experts
        shapes += [(rows, hidden, experts)]
        shapes += int(local) * _mlp(model, share, hidden, model.expert_width / tp)
    else:
        shapes += _mlp(model, rows, hidden, model.mlp_width / tp)
    each = [calibration.product(*shape) for shape in shapes]
    queries = model.seq / run.mesh.cp
    core = calibration.core(model.seq, run.micro_batch_size * model.heads / tp, model.head_size)
    core = core[0] * queries / model.seq, core[1] * queries / model.seq
    forward, backward = float_sum(one for one, _ in each), float_sum(two for _, two in each)
    return MicrobatchSeconds(forward + core[0], backward + core[1], core[0], backward / 2)


def head_products(run: Run, model: Transformer, calibration: Calibration, tp: int = 1) -> MicrobatchSeconds:
    """Return the seconds of the head's product for a microbatch; the arguments are those of ``block_products``."""
    forward, backward = calibration.product(_tokens(run, model), model.hidden, model.vocab / tp)
    return MicrobatchSeconds(forward, backward, 0.0, backward / 2)


def num_logits(run: Run, model: Transformer, tp: int = 1) -> float:
    """Return how many logits of a microbatch an actor has; the arguments are those of ``block_products``."""
    return _tokens(run, model) * model.vocab / tp


def _tokens(run: Run, model: Transformer) -> float:
    return run.micro_batch_size * model.seq / run.mesh.cp


def _mlp(model: Transformer, rows: float, hidden: float, width: float) -> list[tuple[float, float, float]]:
    return [*([(rows, hidden, width)] * (model.mlp_matrices - 1)), (rows, width, hidden)]
