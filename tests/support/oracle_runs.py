"""Runs on threads beside the oracle (tests/oracle), which gets plain tensors and numbers of them."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict
from functools import cache
from operator import itemgetter
from typing import NamedTuple

import torch

from raypar.actors.data.batches import batch_source
from raypar.actors.models.build import build_model
from raypar.actors.models.tiles.tile_names import tile_of, untiled
from raypar.actors.specs.lora import is_adapter
from raypar.actors.specs.model import Layers
from raypar.actors.tensors import cast_floating
from raypar.reporting.report import reports_of
from tests.oracle.training import Microbatch, of_transformer, train
from tests.support.team import Team

LOSS, NORM, GRADIENT = 3e-6, 3e-5, 2e-4
MOVED = {"sgd": 3e-4, "adamw": 1e-3, "muon": 1e-2}  # of how far the weights of a tensor have moved at the most
TIE = 3e-7  # of scores between 0 and 1
ROUNDED = 6  # runs of plain float32 whose first weights differ in their last bits; how far that leads is luck
NOISE = 1e-9  # of the norm of all gradients; an addend of a sixtieth of it is rounded by as much
TIMES = 3.0  # beyond these bounds: so many times as far from float64 as the farthest of some runs of plain float32


class TieError(Exception):
    """Rounding decides which experts a token chooses, so that two runs may both be right and differ."""


class Numbers(NamedTuple):
    """What a run and its oracle are compared by.

    Attributes:
        losses, norms: By step.
        gradients, weights, averages: By name, at the end; gradients are those that the optimizer got.
        margin: Of the oracle, the smallest difference of two scores by which an expert was chosen.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    averages: dict[str, torch.Tensor]
    margin: float = math.inf


def made_by_run(run, steps):
    """The first weights of a run on threads, and its numbers after so many steps."""
    team = Team.of(run)
    first = {name: weight.clone() for name, weight in whole(team.weights()).items()}
    if getattr(run.model, "lora", None) is not None:
        first |= frozen_weights(run.model, run.seed)
    reports = []
    for at, length in _flushes(team.programs["train"].stream, steps):
        results = team.each(lambda actor, at=at, length=length: actor.train(at, None, 0, length))
        if errors := [result for result in results if isinstance(result, Exception)]:
            raise next((error for error in errors if not getattr(error, "secondary", False)), errors[0])
        reports += reports_of(at, 1.0, results, team.world)
    norms = [report.grad_norm for report in reports]
    for dp in range(1, run.mesh.dp if not team.world.gathers else 1):
        assert all(torch.equal(weight, team.weights(dp)[name]) for name, weight in team.weights().items())
    gradients, weights, averages = whole(team.gradients()), whole(team.weights()), dict[str, torch.Tensor]()
    if run.ema is not None:
        team.each(lambda actor: actor.member.state.use_averages(use=True))
        averages = whole(team.weights())
    if getattr(run.model, "tied", False):
        for tensors in (first, gradients, weights, averages):
            drop_copy(tensors)
    return first, Numbers([report.loss for report in reports], norms, gradients, weights, averages)


def frozen_weights(model, seed):
    """The weights that do not learn, whole, by name: in every layout a run begins with these."""
    built = build_model(model, seed)
    layers = zip(built.names, built.materialize(range(len(built.names)), seed), strict=True)
    weights = {f"{name}.{inner}": p.detach() for name, layer in layers for inner, p in layer.named_parameters()}
    return {name: weight for name, weight in weights.items() if not is_adapter(name)}


def whole(tensors):
    """Tensors by name, in which the tiles of a layer are one again."""
    tiles = defaultdict(list)
    for name, tensor in tensors.items():
        tiles[untiled(name)].append((0 if (tile := tile_of(name)) is None else tile.own[0], tensor))
    return {
        name: parts[0][1] if len(parts) == 1 else torch.cat([tensor for _, tensor in sorted(parts, key=itemgetter(0))])
        for name, parts in tiles.items()
    }


def drop_copy(tensors):
    """Drop the copy of the embedding that a pipeline has for its last layer, which has the bits of the embedding."""
    copy = tensors.pop("head.out.weight", None)
    assert copy is None or torch.equal(copy, tensors["embed.tokens.weight"])


def _flushes(stream, steps):
    """Where streams of steps begin, and how long they are; a synchronous schedule has one step at a time."""
    length = stream or 1
    return [(at, min(length, steps - at) if stream else 0) for at in range(0, steps, length)]


def made_by_oracle(run, first, steps, dtype=torch.float64, model=None, padding=None, *, is_reversed=False, **settings):
    """The numbers of the oracle that trains what a run does.

    ``model`` is the loss of own layers, ``padding`` the token that fills sequences up, if one does, and with
    ``is_reversed`` the microbatches of a step are added from the last to the first.
    """
    if model is None:
        assert not isinstance(run.model, Layers)
        biases = _biases(run.model)
        model = of_transformer(asdict(run.model), biases)
        if biases is not None:
            settings["biases"] = biases, run.model.moe.bias_rate
        if run.model.lora is not None:
            settings["frozen"] = [name for name in first if "_lora." not in name]
    source = batch_source(run.data, run.model, run.micro_batch_size, run.microbatches, run.mesh.dp, run.seed)
    read = source.inputs, source.targets

    def batch(*at):
        inputs, targets = (cast_floating(of(*at), dtype)[0] for of in read)
        lengths = None if padding is None else [_length(row, padding) for row in inputs.tolist()]
        return Microbatch(inputs, targets, source.extents(*at).starts, lengths)

    batches = [
        [batch("train", step, microbatch, dp) for microbatch in range(run.microbatches) for dp in range(run.mesh.dp)]
        for step in range(steps)
    ]
    if is_reversed:
        batches = [step[::-1] for step in batches]
    settings = {"num_steps": run.steps, "clip": run.clip, "ema": run.ema} | settings
    trained = train(first, model, batches, asdict(run.optim), dtype=dtype, **settings)
    found = trained.losses, trained.norms, trained.gradients, trained.weights, trained.averages
    return Numbers(*found, trained.margin)


def _last_bits_changed(weights, seed):
    """Weights by name, each of whose values is larger or smaller by one rounding of float32."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight * (1 + 2**-23 * (2 * torch.randint(2, weight.shape, generator=generator, dtype=torch.float64) - 1))
        for name, weight in weights.items()
    }


def _length(row, padding):
    """How many tokens of a sequence are before the padding at its end."""
    return max((at + 1 for at, token in enumerate(row) if token != padding), default=0)


def _biases(model):
    """The first biases of experts by block, if the model has any."""
    if model.moe is None or not model.moe.bias_rate:
        return None
    return {f"blocks.{block}": [0.0] * model.num_experts(block) for block in model.moe.blocks(model.layers)}


def differences(run, steps=3, **settings):
    """What a run on threads has that the oracle has not, a line each; none if all is within the bounds."""
    return compared(run, *made_by_run(run, steps), steps, **settings)


def compared(run, first, ours, steps, **settings):
    """What the numbers of a run, which began with the weights ``first``, have that the oracle has not, a line each."""
    right = made_by_oracle(run, first, steps, **settings)

    @cache  # only where a bound is not kept
    def plain():
        ways = [(first, False), (first, True), *((_last_bits_changed(first, seed), False) for seed in range(ROUNDED))]
        return [
            made_by_oracle(run, begin, steps, torch.float32, is_reversed=turned, **settings) for begin, turned in ways
        ]

    if right.margin < TIE:
        raise TieError(f"experts were chosen by {right.margin:.1e}, which rounding decides")
    floor = NOISE * max(right.norms)
    noise = {name for name, one in right.gradients.items() if 0 < one.norm() <= floor}  # right is 0
    found = []
    for what, bound in (("losses", LOSS), ("norms", NORM)):
        for step, (own, other) in enumerate(zip(getattr(ours, what), getattr(right, what), strict=True)):
            if abs(own - other) <= bound * abs(other):
                continue
            rounded = [getattr(one, what)[step] for one in plain()]
            if not abs(own - other) <= TIMES * max(abs(one - other) for one in rounded):
                found.append(f"{what} of step {step + 1}: {own} is not {other} (in float32 {rounded})")
    for name, gradient in ours.gradients.items():
        if name in noise:
            continue
        if gradient is None:
            if name in right.gradients and right.gradients[name].abs().max() > 0:
                found.append(f"gradient of {name}: there is none")
        else:
            rounded = lambda name=name: [one.gradients[name] for one in plain()]  # noqa: E731
            found += _far(f"gradient of {name}", gradient, right.gradients[name], rounded, GRADIENT, floor=floor)
    for what in ("weights", "averages"):
        own, other = getattr(ours, what), getattr(right, what)
        for name in own.keys() - noise:
            rounded = lambda what=what, name=name: [getattr(one, what)[name] for one in plain()]  # noqa: E731
            moved = (other[name] - first[name]).abs().max().item()
            found += _far(f"{what}: {name}", own[name], other[name], rounded, MOVED[run.optim.kind], moved)
    return found


def _far(what, own, right, plain, bound, size=None, floor=0.0):
    """A line if a tensor is too far from the right one; ``plain`` returns it of some runs in plain float32.

    What differs by less than the floor is what is left where larger addends cancel each other.
    """
    size = right.abs().max().item() if size is None else size
    off = (own.double() - right).abs().max().item()
    if off <= max(bound * size, floor):
        return []
    rounding = max((one.double() - right).abs().max().item() for one in plain())
    if off <= TIMES * rounding:
        return []
    return [f"{what}: off by {off:.3g} of {size:.3g} (in float32 {rounding:.3g})"]
