"""What the actions of a training step cost on paper."""

from __future__ import annotations

from typing import NamedTuple

from raypar.actors.models.partition import core_cost, split_layers, transformer_costs
from raypar.actors.specs.model import GPT, Layers, Llama, Transformer
from raypar.actors.specs.recompute import Recompute, word_of
from raypar.actors.specs.types import Split
from raypar.schedules.action import Op
from raypar.schedules.simulation.simulate import Costs


class _Work(NamedTuple):
    """What a microbatch costs a stage: its forward, what its backward runs again, what it can leave for W."""

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
    """A stage's forward lasts as its layers' FLOPs say, a backward twice as long; the user's own Layers count as stages
    of equal length.

    Args:
        model: what is trained.
        num_stages: of the pipeline, at most as many as the model has layers.
        split: of the layers over the stages.
        recompute: what a backward runs again, which it takes time for.
        tensor_ranks: actors that divide each layer. W makes nothing in layers that are divided.

    Returns:
        F, B, I and W of every stage, in FLOPs of one sample's forward up to a common factor.
    """
    of_stage: dict[tuple[int, Op], float] = {}
    for stage, (forward, again, later) in enumerate(_works(model, num_stages, split, recompute, tensor_ranks == 1)):
        backward = {Op.B: 2 * forward + again, Op.I: 2 * forward + again - later, Op.W: later}
        of_stage |= {(stage, op): cost for op, cost in ({Op.F: forward} | backward).items()}
    return Costs(of_stage=of_stage)


def _works(
    model: GPT | Llama | Layers, num_stages: int, split: Split, recompute: Recompute, whole_layers: bool
) -> list[_Work]:
    """A W makes the gradients of linear layers that are not divided, in layers that are not run again by themselves."""
    if not isinstance(model, Transformer):
        return [_Work(1.0, 1.0 if recompute == "full" else 0.0, 1.0 if whole_layers else 0.0)] * num_stages
    costs, body, core = transformer_costs(model), range(model.layers), core_cost(model)
    scores = model.attention == "materialised" or model.dropout > 0  # else the kernel does it in any case
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
