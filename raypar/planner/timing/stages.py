"""How long forward and backward of each pipeline stage take for a microbatch, with the messages inside of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from raypar.actors.models.partition import split_layers, transformer_costs
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.recompute import word_of
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import Split
from raypar.planner.hardware.data_sheets import Device
from raypar.planner.timing.layer import LayerOperation, embedding_parts, head_parts, layer_parts
from raypar.planner.timing.messages import Messages
from raypar.planner.timing.roofline import Roofline
from raypar.schedules.float_sum import float_sum


class StageSeconds(NamedTuple):
    """The seconds of a layer or a stage for a microbatch.

    Attributes:
        forward: Its forward's operations.
        backward: Its backward's operations, but for what it computes again.
        weights: Those of ``backward`` that make the gradients of weights, which a W can do.
        again: What the backward computes again.
        messages: Messages inside of its layers, of the forward.
        replies: Messages inside of its layers, of the backward and of what it computes again.
    """

    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0
    again: float = 0.0
    messages: float = 0.0
    replies: float = 0.0

    @property
    def f(self) -> float:
        """Seconds of an F."""
        return self.forward + self.messages

    @property
    def b(self) -> float:
        """Seconds of a B."""
        return self.backward + self.again + self.replies

    @property
    def both(self) -> float:
        """Seconds of an F and a B."""
        return self.f + self.b


def summed_times(each: Iterable[tuple[StageSeconds, int]]) -> StageSeconds:
    """Return the sum of some, each so many times."""
    pairs = [*each]
    return StageSeconds(
        *(float_sum(one[field] * times for one, times in pairs) for field in range(len(StageSeconds._fields)))
    )


@lru_cache(maxsize=512)
def stage_layers(model: GPT | Llama, split: Split, num_stages: int) -> tuple[range, ...]:
    """Return the layers of each stage; a search asks for the same ones thousands of times.

    Args:
        model: The model.
        split: How its layers are split into stages.
        num_stages: Number of stages.
    """
    return split_layers(split, transformer_costs(model), num_stages)


def stages_of(
    run: Run, model: GPT | Llama, device: Device, messages: Messages, num_stages: int, *, slices_loss: bool
) -> list[StageSeconds]:
    """Return the seconds of each stage; the first one's with the embedding, and the last one's with the head.

    Args:
        run: The run.
        model: Its model.
        device: What each actor has.
        messages: The seconds of messages of a microbatch.
        num_stages: Number of stages.
        slices_loss: Whether the loss is computed from slices of the vocabulary.
    """
    roofline = Roofline.of(device, half=run.precision.is_half)
    kinds = [
        (model.num_experts(block), word_of(run.recompute, range(model.layers), block)) for block in range(model.layers)
    ]
    each = {kind: _layer(run, model, roofline, messages, *kind) for kind in dict.fromkeys(kinds)}
    ends = _ends(run, model, roofline, messages)
    if slices_loss:  # the head makes logits again in its backward, and all gradients at once
        ends = ends[0], ends[1]._replace(again=ends[1].forward, weights=0.0)
    stages = []
    for stage, layers in enumerate(stage_layers(model, run.split, num_stages)):
        counted = [(each[kind], times) for kind, times in Counter(kinds[layers.start : layers.stop]).items()]
        counted += [(ends[0], 1)] if stage == 0 else []
        counted += [(ends[1], 1)] if stage == num_stages - 1 else []
        stages.append(summed_times(counted))
    return stages


def _layer(
    run: Run, model: GPT | Llama, roofline: Roofline, messages: Messages, num_experts: int, word: str
) -> StageSeconds:
    """Return the seconds of a layer with so many experts, of which ``word`` says what is recomputed."""
    parts = layer_parts(run, model, num_experts)
    spent = _spent(parts, roofline)
    of_core = _spent((part for part in parts if part.is_core), roofline)
    core, core_back = of_core.forward, of_core.backward
    along, back = (
        (max(0.0, messages.context - core), max(0.0, 2 * messages.context - core_back))
        if messages.hides
        else (messages.context, 2 * messages.context)
    )
    inside = 2 * messages.tensor + (2 * messages.experts if num_experts else 0.0)
    forward, replies = inside + along, inside + back
    if word == "full":
        return spent._replace(again=spent.forward, messages=forward, replies=replies + forward)
    again = core if word == "selective" and not any(part.kind == "fused" for part in parts) else 0.0
    return spent._replace(again=again, messages=forward, replies=replies)


def _ends(run: Run, model: GPT | Llama, roofline: Roofline, messages: Messages) -> tuple[StageSeconds, StageSeconds]:
    """Return the seconds of the embedding and of the head; each has one sum over tensor ranks."""
    first = _spent(embedding_parts(run, model), roofline)._replace(messages=messages.tensor)
    last = _spent(head_parts(run, model), roofline)._replace(replies=messages.tensor)
    return first, last


def _spent(parts: Iterable[LayerOperation], roofline: Roofline) -> StageSeconds:
    """Return the seconds of operations, without messages."""
    parts = [*parts]
    forward = float_sum(roofline.seconds(part.does) for part in parts)
    backward = float_sum(roofline.seconds(each) for part in parts for each in part.backward)
    weights = float_sum(roofline.seconds(part.of_weights) for part in parts if part.of_weights)
    return StageSeconds(forward, backward, weights)
