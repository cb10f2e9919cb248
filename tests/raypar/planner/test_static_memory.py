"""Weights, gradients and optimizer state by the planner's formulas, beside the memory that tensors really lie in."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType

import pytest
import torch
from hypothesis import given, reject, seed, settings
from hypothesis import strategies as st
from torch import nn

from raypar.actors.collective.group import Group
from raypar.actors.machine.flat_memory import FlatMemory
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.optim import SGD, AdamW, Muon
from raypar.actors.specs.precision import Precision
from raypar.actors.specs.run import Run
from raypar.actors.specs.worlds import world_of
from raypar.config.run import check_run
from raypar.planner.memory.worker import worker_memory
from raypar.planner.prediction import from_flops
from raypar.planner.sizes.sized_run import SizedRun
from tests.support.counted import threads
from tests.support.held_bytes import num_bytes
from tests.support.layouts import SEQ, VOCAB, sound, tokens
from tests.support.team import Team
from tests.support.thinned import thinned

NEAR = 0.03
EXPERTS = (
    MoE(experts=4, top_k=2),
    MoE(experts=4, top_k=1, width=48, shared=1),
    MoE(experts=4, top_k=1, residual=True, gate="shazeer", every=2),
)
APART = ModuleType, type, FunctionType, Group
PRECISIONS = Precision(), Precision("bf16"), Precision("bf16", reduce="bf16")


@st.composite
def runs(draw, moe):
    """A run on one to eight actors."""
    pp, tp, cp = (draw(st.sampled_from([1, 1, 2])) for _ in range(3))
    dp = draw(st.sampled_from([2, 1, 3, 4]))
    sizes = {"layers": draw(st.integers(2, 3)), "hidden": draw(st.sampled_from([16, 24])), "heads": 4}
    kind = draw(st.sampled_from([GPT, Llama]))
    run = Run(
        model=kind(**sizes, seq=SEQ, vocab=draw(st.sampled_from([VOCAB + 1, 96])), tied=draw(st.booleans()), moe=moe),
        mesh=Mesh(pp=pp, dp=dp, tp=tp, cp=cp, ep=draw(st.sampled_from([2, 1])) if moe else 1),
        data=Batches(tokens),
        zero=draw(st.sampled_from([0, 1, 2, 3])) if dp * cp > 1 else None,
        precision=draw(st.sampled_from(PRECISIONS)),
        optim=draw(st.sampled_from([AdamW(), SGD(momentum=0.9), SGD(momentum=0.0), Muon()])),
        ema=draw(st.sampled_from([None, None, 0.9])),
        microbatches=dp,
        steps=2,
        timeout=20.0,
    )
    if run.mesh.size > 8:
        reject()
    return sound(run)


class Held:
    """The bytes of all floating-point tensors that an actor of a Team can reach when its update begins."""

    def __init__(self, actor) -> None:
        self._member, self.bytes = actor.member, 0
        update = self._member.state.update
        self._step, update.step = update.step, self._stepped

    def _stepped(self, *args):
        self.bytes = max(self.bytes, num_bytes(reached(self._member)))
        return self._step(*args)


def reached(start):
    """All floating-point tensors that an object refers to, directly or not; not through groups, to other actors.

    Weights that are whole only for a while are left out: by then their memory is given back.
    """
    seen, left, found, released = {id(start)}, [start], [], set()
    while left:
        one = left.pop()
        if isinstance(one, FlatMemory):
            released.add(one.tensor.untyped_storage().data_ptr())
            continue
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            found.append(one)
        gradient = one.grad if isinstance(one, nn.Parameter) else None  # unknown to gc
        for other in (*gc.get_referents(one), *([] if gradient is None else [gradient])):
            if id(other) not in seen and not isinstance(other, APART):
                seen.add(id(other))
                left.append(other)
    return [one for one in found if one.untyped_storage().data_ptr() not in released]


@pytest.mark.long
@pytest.mark.parametrize("moe", thinned([None, *EXPERTS], lambda moe: moe == EXPERTS[0]))
def test_static_memory_is_what_tensors_really_take(moe):
    """Of a pipeline rank the actor counts that holds most: parameters are owned whole."""

    @seed(34)
    @settings(max_examples=5, database=None)
    @given(run=runs(moe))
    def holds(run):
        schedule, world = check_run(run)["train"], world_of(run)
        sized = SizedRun.of(run, schedule)
        said = worker_memory(sized, from_flops(sized).timeline)
        team = Team.of(run)
        held = [Held(actor) for actor in team.workers]
        for step in range(run.steps):  # the first update makes the optimizer's state
            team.step(step)
        for pp, memory in enumerate(said):
            most = max(one.bytes for rank, one in enumerate(held) if world.pp(rank) == pp)
            assert memory.state == pytest.approx(most, rel=NEAR)

    with threads(1):
        holds()
