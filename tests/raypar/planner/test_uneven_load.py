"""What an uneven load of experts adds to the memory of an actor, beside what an actor keeps that gets all tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import GPT
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.run import Run
from raypar.config.run import check_run
from raypar.planner.memory.activations import most_kept, uneven_load
from raypar.planner.memory.worker import WORKING_OF, worker_memory
from raypar.planner.prediction import from_flops
from raypar.planner.sizes.sized_run import SizedRun
from tests.support.counted import threads
from tests.support.expert_layouts import tilted
from tests.support.held_bytes import Held
from tests.support.layouts import SEQ, VOCAB, tokens
from tests.support.team import Team

MODEL = GPT(layers=2, hidden=32, heads=4, seq=SEQ, vocab=VOCAB, moe=MoE(experts=4, top_k=2), attention="materialised")
RUN = Run(
    model=MODEL, mesh=Mesh(dp=2, ep=2), data=Batches(tokens), micro_batch_size=2, microbatches=2, steps=2, timeout=20.0,
    device="cpu",
)  # fmt: skip


@pytest.mark.parametrize("mesh", [Mesh(dp=2, ep=2), Mesh(dp=2, tp=2, ep=2)])
def test_an_actor_that_gets_all_tokens_keeps_what_is_counted(mesh):
    run = replace(RUN, mesh=mesh)
    sized = SizedRun.of(run, check_run(run)["train"])
    timeline = from_flops(sized).timeline
    (even,), (experts,) = most_kept(run, MODEL, timeline), most_kept(run, MODEL, timeline, apart=True)
    with threads(1), tilted("two experts"):
        team = Team.of(run)
        held = [Held(actor) for actor in team.workers]
        team.step()
    most = max(size for one in held for action, size in one.activations.items() if "F" in action)
    assert uneven_load(run, MODEL) == 2
    assert even + experts == pytest.approx(most, rel=0.06)
    (memory,) = worker_memory(sized, timeline)
    again = even + experts  # freed blocks that do not fit
    assert memory.working == pytest.approx(again * (1 + 2 * WORKING_OF["cpu"]) + experts, abs=2)


def test_a_load_is_as_uneven_as_choices_and_capacity_allow():
    def load(mesh=RUN.mesh, **of_moe):
        model = replace(MODEL, moe=replace(MODEL.moe, **of_moe))
        return uneven_load(replace(RUN, model=model, mesh=mesh), model)

    assert (load(), load(capacity=1.25), load(mesh=Mesh(dp=2))) == (2, 1.25, 1)
    assert load(mesh=Mesh(dp=4, ep=4), top_k=4) == 1, "a token chooses experts of every actor"
    assert load(top_k=3) == pytest.approx(4 / 3)
    assert load(mesh=Mesh(dp=4, ep=4)) == 2, "and not four times"
