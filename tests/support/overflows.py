"""Overflows that a test forces on one actor in one microbatch, and what a step that is skipped must not change."""

from __future__ import annotations

import math
from dataclasses import fields

import torch

import raypar as rp
from tests.support.team import Team

LAYOUTS = [{"pp": 2}, {"dp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2, "dp": 2}]
MESH = [field.name for field in fields(rp.Mesh)]
SHARDED = [{"dp": 2, "zero": 2}, {"dp": 2, "zero": 3}, {"pp": 2, "dp": 2, "zero": 3}, {"dp": 4, "shard": 2, "zero": 3}]


def poison(actor, at):
    """Make the gradient of one norm of an actor infinite in (step, microbatch)."""
    stage = next(iter(actor.stages.values()))
    weight = next(p for name, p in stage.parameters().items() if ".norm1.weight" in name)
    now, real = [None], stage._backward_input  # of whole and of split backwards

    def backward(step, microbatch, gradients):
        now[0] = step, microbatch
        return real(step, microbatch, gradients)

    stage._backward_input = backward
    weight.register_hook(lambda gradient: gradient * math.inf if now[0] == at else gradient)


def state_of(actor):
    state = actor.member.state
    found = {f"{name} {key}": value for name, key, value in state.update.state()} | state.parameters
    return {name: value.detach().clone() for name, value in found.items()}


def laid_out(layout):
    """The fields of a run: the axes of its mesh, and others."""
    axes = {axis: size for axis, size in layout.items() if axis in MESH}
    return {"mesh": rp.Mesh(**axes)} | {name: value for name, value in layout.items() if name not in MESH}


def not_skipped(run, rank, microbatch):
    """What is wrong after an overflow in a microbatch of the second step on one actor: of scales, rates and states.

    The rate of the run falls linearly, and its window is longer than three steps.
    """
    team = Team.of(run)
    dp = run.mesh.coordinate(rank)["dp"]
    poison(team.all[rank], (1, microbatch * run.mesh.dp + dp))
    first = team.step(0)
    before = [state_of(actor) for actor in team.all]
    second = team.step(1)
    for number, (actor, was) in enumerate(zip(team.all, before, strict=True)):
        now = state_of(actor)
        if now.keys() != was.keys() or not all(torch.equal(now[name], value) for name, value in was.items()):
            yield f"the state of actor {number} has changed"
    third = team.step(2)
    if not all(result.is_skipped and result.lr is None for result in second):
        yield "an actor has not skipped the step"
    scales = [{result.scale for result in results} for results in (first, second, third)]
    if scales != [{run.loss_scale.init}, {run.loss_scale.init}, {run.loss_scale.init / 2}]:
        yield f"the scales are {scales}"
    (one,), (other,) = ({result.lr for result in results} - {None} for results in (first, third))
    if one != run.optim.lr or not math.isclose(other, run.optim.lr * (1 - 0.9 / run.steps)):
        yield f"the rates are {one} and {other}, not as if the step had not been"
