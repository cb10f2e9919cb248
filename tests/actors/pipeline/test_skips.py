"""Skips between layers on different actors: the bits of one process, and messages straight to their stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import Layers
from raypar.schedules.catalog import CATALOG
from tests.support.plain import trained
from tests.support.replicas import agrees
from tests.support.schedules import ONE_ROW_A_RANK
from tests.support.team import Team, mse
from tests.support.thread_jobs import Hands, TeamJob

WIDTH, ROWS = 6, 3
BYTES = WIDTH * ROWS * 4  # of a value of one microbatch
STREAMS = [name for name, entry in CATALOG.items() if entry.is_stream]


class Mixed(nn.Module):
    """A layer that takes any number of values, each with weights of its own."""

    def __init__(self, values=1):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(values))

    def forward(self, *values):
        return torch.tanh(sum(part(value) for part, value in zip(self.parts, values, strict=True)))


def net(skips, count=8):
    """Layers of which each takes as many values as there are skips to it."""
    return lambda: [Mixed(1 + sum(target == layer for _, target in skips)) for layer in range(count)]


def batch(step, microbatch, dp):
    generator = torch.Generator().manual_seed(100 * step + microbatch + 1000 * dp)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, x.sin()


def team_of(skips, *sizes, count=8, plan=(), **changes):
    model = Layers(net(tuple(skips), count), mse, skips=tuple(skips), halves=True, plan=dict(plan))
    return Team(None, *sizes, model=model, data=batch, **changes)


UNET = ((0, 7), (1, 6), (2, 5))


@pytest.mark.sampled
@pytest.mark.parametrize("name", ONE_ROW_A_RANK)
def test_skips_over_stages_have_the_bits_of_one_process(name):
    backward = ("whole", "auto", "split")[ONE_ROW_A_RANK.index(name) % 3]
    agrees(team_of(UNET, 4, 5, name, steps=2, backward=backward), bound=0.0)


def test_a_skip_sends_its_bytes_once_forward_and_once_back():
    tables = {}
    for skips in (), ((0, 3),):
        team = team_of(skips, 4, 5, count=4)
        team.step()
        tables[skips] = [table.get("send", (0, 0)) for table in team.ledger("pp")]
    more = [(calls - was[0], size - was[1]) for (calls, size), was in zip(tables[((0, 3),)], tables[()], strict=True)]
    assert more == [(5, 5 * BYTES), (0, 0), (0, 0), (5, 5 * BYTES)]


def test_a_value_goes_to_a_stage_once_whatever_layers_there_take_it():
    team = team_of(((0, 6), (0, 7)), 4, 3)
    agrees(team, bound=0.0)
    sent = [table["send"][0] for table in team.ledger("pp")]
    assert sent == [3 * (3 + 3), 3 * (3 + 3), 3 * (3 + 3), 3 * (3 + 3)]


def test_a_v_holds_both_ends_of_its_skips_and_sends_nothing_for_them():
    tables = []
    for skips in (), ((0, 7), (1, 6), (2, 5)):
        team = team_of(skips, 4, 8, "zb-v")
        team.step()
        tables.append(team.ledger("pp"))
    assert [table["send"] for table in tables[0]] == [table["send"] for table in tables[1]]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": "full"},
        {"recompute": ("full", "none") * 4},
        {"dp": 2},
        {"dp": 2, "zero": 3},
        {"tp": 2, "plan": {"layers.*.parts.0": "column_gather_output"}},
        {"mesh": rp.Mesh(pp=3, rank_dp=(2, 3, 1)), "microbatches": 6},
        {"mesh": rp.Mesh(pp=2, rank_dp=(2, 2)), "microbatches": 8, "schedule": "dualpipe"},
    ],
    ids=str,
)
def test_skips_combine_with_recomputation_and_replicas(changes):
    changes = dict(changes)
    sizes = (changes["mesh"].pp, changes.pop("microbatches")) if "mesh" in changes else (4, 4)
    agrees(team_of((*UNET, (0, 3), (0, 4)), *sizes, **changes), bound=1e-6)


def test_frozen_stages_get_no_gradients_of_skips():
    def frozen():
        layers = net(UNET)()
        for layer in layers[:3]:
            layer.requires_grad_(False)
        return layers

    team = Team(None, 4, 3, model=Layers(frozen, mse, skips=UNET), data=batch)
    agrees(team, bound=0.0)
    sent = [table["send"][0] for table in team.ledger("pp")]
    assert sent == [9 * (1 + 2), 9 * (1 + 1), 9 * (1 + 1 + 1), 9 * 1], "nothing goes back to the frozen stage 0"


@pytest.mark.sampled
@pytest.mark.parametrize("name", STREAMS)
def test_asynchronous_schedules_take_skips_and_flushed_after_every_step_have_the_bits_of_one_process(name):
    team = team_of(UNET, 4, 4, name, steps=3, zero=0, flush_every=1)
    plain = trained(team.run)
    for number in range(3):
        for result in team.each(lambda actor, number=number: actor.train(number, None, 0, 1)):
            assert not isinstance(result, Exception), result
    for name, weight in team.weights().items():
        assert torch.equal(weight, plain.weights[name])


def test_steps_by_hand_have_the_bits_of_compiled_ones_and_show_the_skip():
    run = team_of(((0, 3),), 4, 2, count=4).run
    job, hands = TeamJob(run), Hands(Team.of(run))
    compiled, stepper = job.step(), hands.stepper()
    assert "0SEND_F0@3" in str(stepper.schedule.rows[0])
    stepper.do("0F0")
    stepper.do("0SEND_F0@3")
    assert stepper.peek("3RECV_F0@0").actor == "pp=3"
    by_hand = stepper.finish()
    assert (by_hand.loss, by_hand.grad_norm) == (compiled.loss, compiled.grad_norm)
    job.close()
    hands.close()


def test_a_layer_that_writes_into_what_a_skip_gives_is_told():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    layers = [nn.Linear(WIDTH, WIDTH), InPlace(), nn.Identity(), Mixed(2)]
    for pp in 1, 2:
        model = Layers(lambda: layers, mse, skips=((0, 3),))
        team = Team(None, pp, 1, model=model, data=batch)
        found = [one for one in team.each(lambda actor: actor.train(0)) if isinstance(one, Exception)]
        assert any(
            "a layer writes into the output of layers.0, which model.skips give to a later" in str(one) for one in found
        )


@pytest.mark.parametrize(
    ("skips", "says"),
    [
        (((0, 9),), "model.skips has (0, 9), and the layers are 0 to 3: correct it"),
        (((2, 0),), "model.skips has (2, 0), which does not go forward: give the earlier layer first"),
        (((0, 1),), "model.skips has (0, 1), and layers.1 gets what layers.0 returns in any case: leave it out"),
        (((0, 3), (0, 3)), "model.skips has (0, 3) twice: leave one out"),
    ],
)
def test_wrong_skips_are_told(skips, says):
    model = Layers(net((), 4), mse, skips=skips)
    assert says in rp.faults(rp.Run(model=model, data=Batches(batch, batch), mesh=rp.Mesh(pp=2), microbatches=2))
