"""The cost model: how long the actions of a training step last, predicted from FLOPs."""

from __future__ import annotations

from typing import NamedTuple

from raypar.actors.models.partition import core_cost, split_layers, transformer_costs
from raypar.actors.specs.model import GPT, Layers, Llama, Transformer
from raypar.actors.specs.recompute import Recompute, word_of
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import Split
from raypar.schedules.action import Op
from raypar.schedules.simulation.simulate import Costs


def costs_of_run(run: Run, num_stages: int) -> Costs:
    """Return the estimated durations of the actions of a run's training step, from the FLOPs of its layers."""
    ranks = run.mesh.tensor_ranks
    return costs_on_paper(run.model, num_stages, split=run.split, recompute=run.recompute, tensor_ranks=ranks)


class _Work(NamedTuple):
    """What one microbatch costs one stage.

    Attributes:
        forward: Cost of its forward.
        again: Cost of what its backward recomputes.
        later: Cost of the weight gradients that its backward can leave for W.
    """

    forward: float
    again: float
    later: float


def costs_on_paper(
    model: GPT | Llama | Layers,
    num_stages: int,
    *,
    split: Split = "even",
    recompute: Recompute = "none",
    tensor_ranks: int = 1,
) -> Costs:
    """Predict the costs of the compute actions of every stage.

    A forward costs the FLOPs of its layers, and a backward twice as much plus what it recomputes. FLOPs of the user's
    own Layers are unknown, so their stages count as equal.

    Args:
        model: The model.
        num_stages: Number of pipeline stages, at most the number of layers.
        split: How the layers are split into stages.
        recompute: What a backward recomputes.
        tensor_ranks: Number of tensor-parallel ranks. If there are several, a backward leaves nothing for W.

    Returns:
        The costs of F, B, I and W of every stage, in FLOPs per token; for Layers, in forwards of a stage.
    """
    of_stage: dict[tuple[int, Op], float] = {}
    for stage, (forward, again, later) in enumerate(_works(model, num_stages, split, recompute, tensor_ranks == 1)):
        backward = {Op.B: 2 * forward + again, Op.I: 2 * forward + again - later, Op.W: later}
        of_stage |= {(stage, op): cost for op, cost in ({Op.F: forward} | backward).items()}
    return Costs(of_stage=of_stage)


def _works(
    model: GPT | Llama | Layers, num_stages: int, split: Split, recompute: Recompute, whole_layers: bool
) -> list[_Work]:
    """Compute the work of every stage.

    A backward can leave the weight gradients of linear layers for W if the layers are not sharded (``whole_layers``)
    and are not recomputed one by one.
    """
    if not isinstance(model, Transformer):
        return [_Work(1.0, 1.0 if recompute == "full" else 0.0, 1.0 if whole_layers else 0.0)] * num_stages
    costs, body, core = transformer_costs(model), range(model.layers), core_cost(model)
    scores = model.attention == "materialised" or model.dropout > 0  # else the kernel recomputes them anyway
    words = [word_of(recompute, body, layer) for layer in body]
    again = [
        {"none": 0.0, "selective": core if scores else 0.0, "full": cost}[word]
        for word, cost in zip(words, costs, strict=True)
    ]
    alone = [word == "full" and recompute != "full" for word in words]
    later = [cost - core if whole_layers and not own else 0.0 for cost, own in zip(costs, alone, strict=True)]
    return [
        _Work(*(sum(each[layer] for layer in layers) for each in (costs, again, later)))
        for layers in split_layers(split, costs, num_stages)
    ]
