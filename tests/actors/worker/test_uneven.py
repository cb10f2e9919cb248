"""Pipelines whose ranks have different numbers of replicas or of tensor ranks, on actors in threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import raypar as rp
from raypar.actors.specs.optim import SGD
from raypar.parity.verify import verify
from raypar.schedules.action import Op
from tests.support.replicas import UNEQUAL, agrees
from tests.support.team import Team, linears
from tests.support.thread_jobs import Hands, TeamJob

GPT = rp.GPT(layers=4, hidden=16, heads=2, seq=8, tied=False, dropout=0.0)
RUN = rp.Run(model=GPT, microbatches=6, steps=2, device="cpu", timeout=20.0)
MESHES = {
    "2-3-1": rp.Mesh(pp=3, rank_dp=(2, 3, 1)),
    "1-2": rp.Mesh(pp=2, rank_dp=(1, 2)),
    "tp 2-1": rp.Mesh(pp=2, rank_tp=(2, 1)),
    "tp 1-2": rp.Mesh(pp=2, rank_tp=(1, 2)),
    "dp 1-2, tp 2-1": rp.Mesh(pp=2, rank_dp=(1, 2), rank_tp=(2, 1)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_a_pipeline_of_uneven_ranks_is_one_plain_process(mesh):
    verdict = verify(run := replace(RUN, mesh=mesh), TeamJob(run))
    assert verdict.ok, str(verdict)
    assert verdict.replicas == max(mesh.rank_dp, default=1)
    assert verdict.differences, "other orders of additions"


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb-v", "zb-h1"])
def test_other_schedules_with_replicas(schedule):
    agrees(Team(linears(4), 2, 4, schedule, mesh=rp.Mesh(pp=2, rank_dp=(2, 1))))
    agrees(Team(linears(4), 2, 4, schedule, mesh=rp.Mesh(pp=2, rank_dp=(1, 2)), **UNEQUAL))


@pytest.mark.sampled
@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"rank_tp": (2, 2)}], ids=["plain", "tied", "tp 2"])
def test_both_directions_of_dualpipe_are_one_plain_process(changes):
    model = replace(GPT, layers=6, tied=changes.get("tied", False))
    mesh = rp.Mesh(pp=2, rank_dp=(2, 2), rank_tp=changes.get("rank_tp", ()))
    run = replace(RUN, model=model, mesh=mesh, schedule="dualpipe", microbatches=8)
    verdict = verify(run, TeamJob(run))
    assert verdict.ok, str(verdict)
    assert verdict.replicas == 2


def test_dualpipe_moves_each_value_once_and_each_gradient_once_to_its_other_replica():
    team = Team(linears(8), 2, 8, "dualpipe", mesh=rp.Mesh(pp=2, rank_dp=(2, 2)))
    team.step()
    values = 3 * 4 * 4  # bytes of what one stage gives to the next, (3, 4) in fp32
    weights = 4 * (4 * 4 + 4) * 4  # bytes of the four layers of a rank
    for dp, pp in zip(team.ledger("dp"), team.ledger("pp"), strict=True):
        sent = [one for op, one in pp.items() if op == "send"]
        assert sum(calls for calls, _ in sent) * values == sum(count for _, count in sent)
        assert weights < dp["all_reduce"][1] <= weights + 64, "and a few numbers"
    sent = [table["send"][0] for table in team.ledger("pp")]
    assert sum(sent) == 2 * 3 * 8, "three boundaries, there and back"


@pytest.mark.long
def test_tied_weights_of_ranks_with_different_replicas():
    run = replace(RUN, mesh=MESHES["2-3-1"], model=replace(GPT, tied=True))
    verdict = verify(run, TeamJob(run))
    assert verdict.ok, str(verdict)


def test_two_microbatches_of_two_replicas_have_the_same_bits():
    run = replace(RUN, mesh=rp.Mesh(pp=2, rank_dp=(2, 1)), microbatches=2)
    assert verify(run, TeamJob(run)).bitwise


def test_messages_go_to_the_replica_whose_turn_it_is():
    team = Team(linears(3), 3, 6, mesh=rp.Mesh(pp=3, rank_dp=(2, 3, 1)))
    team.step()
    assert [worker.member.context.label for worker in team.workers] == [
        *("pp=0 dp=0", "pp=0 dp=1", "pp=1 dp=0", "pp=1 dp=1", "pp=1 dp=2", "pp=2")
    ]
    for row, worker in enumerate(team.workers):
        here = [event.action.microbatch for event in worker.events() if event.action.op is Op.F]
        assert sorted(here) == list(team.programs["train"].microbatches_of(row, worker.member.context.pp))
    shapes = [table.get("send shapes", (0, 0))[0] for table in team.ledger("pp")]
    assert shapes == [3, 3, 1, 1, 1, 0], "each sender tells each of its receivers once"
    sent = [sum(calls for op, (calls, _) in table.items() if op == "send") for table in team.ledger("pp")]
    assert sent == [3, 3, 4, 4, 4, 6], "a value is sent once"
    assert [bool(table) for table in team.ledger("dp")] == [True] * 5 + [False]


def test_a_sender_with_fewer_tensor_ranks_sends_to_all_and_with_more_only_one_sends():
    sends = {}
    for name in ("tp 2-1", "tp 1-2"):
        team = Team.of(replace(RUN, mesh=MESHES[name]))
        team.step()
        sends[name] = [table["send"][0] if "send" in table else 0 for table in team.ledger("pp")]
    assert sends == {"tp 2-1": [6, 0, 12], "tp 1-2": [12, 6, 0]}


def test_unequal_shapes_of_two_replicas_are_told():
    def data(step, microbatch, dp):
        x = torch.ones(2 + microbatch, 4)
        return x, x

    team = Team(linears(2), 2, 2, mesh=rp.Mesh(pp=2, rank_dp=(2, 1)), data=data)
    found = [str(result) for result in team.each(lambda actor: actor.train(0)) if isinstance(result, Exception)]
    says = "stage 0 returned float32[3, 4], for an earlier microbatch float32[2, 4]: give batches of one shape"
    assert [one for one in found if says in one], found


def test_steps_by_hand_have_the_bits_of_compiled_ones():
    run = replace(RUN, mesh=MESHES["dp 1-2, tp 2-1"], microbatches=4)
    job, hands = TeamJob(run), Hands(Team.of(run))
    compiled, stepper = job.step(), hands.stepper()
    stepper.do("0F0")
    stepper.do("0F1")
    assert stepper.peek("0F1", tp=1).actor == "pp=0 tp=1"
    by_hand = stepper.finish()
    assert (by_hand.loss, by_hand.grad_norm) == (compiled.loss, compiled.grad_norm)
    ours, theirs = hands.team.weights(), dict(job.weights())
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
    job.close()
    hands.close()


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-vertical", "pipedream-2bw"])
def test_asynchronous_replicas_make_the_updates_of_one(schedule):
    fields = {"steps": 6, "zero": 0, "flush_every": 3, "optim": SGD(lr=0.05)}
    teams = [
        Team(linears(3), 3, 6, schedule, mesh=mesh, **fields)
        for mesh in (rp.Mesh(pp=3), rp.Mesh(pp=3, rank_dp=(2, 3, 1)))
    ]
    for first in (0, 3):
        for team in teams:
            found = team.each(lambda actor, first=first: actor.train(first, None, 0, 3))
            assert not [one for one in found if isinstance(one, Exception)]
    one, several = (team.weights() for team in teams)
    for name, weight in one.items():
        torch.testing.assert_close(several[name], weight, rtol=1e-6, atol=1e-7)
        assert torch.equal(several[name], teams[1].weights(dp=1)[name])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mesh": rp.Mesh(pp=2, rank_dp=(2, 3, 1))}, "mesh.rank_dp is (2, 3, 1), for 2 pipeline ranks (mesh.pp): give"),
        (
            {"mesh": rp.Mesh(pp=2, dp=2, rank_dp=(2, 1))},
            "mesh.dp is 2, which is for all ranks, and does not combine with mesh.rank_dp: leave one out",
        ),
        (
            {"mesh": rp.Mesh(pp=2, tp=2, rank_dp=(2, 1))},
            "does not combine with mesh.rank_dp: leave one out, or give it for each rank as mesh.rank_tp",
        ),
        ({"microbatches": 3}, "microbatches is 3, but mesh.rank_dp is (2, 1), and as many replicas take a step's"),
        (
            {"zero": 2},
            "zero is 2, but with mesh.rank_dp every replica of a rank updates all its weights: leave zero out",
        ),
        (
            {"max_failures": 1},
            "max_failures is 1, but with mesh.rank_dp a run ends with its first failure: set max_failures to 0",
        ),
        ({"mesh": rp.Mesh(pp=2, rank_tp=(3, 1))}, "mesh.rank_tp 3 does not divide model.heads 2"),
        ({"mesh": rp.Mesh(pp=2, rank_tp=(2, 1)), "model": replace(GPT, tied=True)}, "set model.tied to False"),
    ],
)
def test_what_does_not_combine_is_told(changes, says):
    run = replace(RUN, **{"mesh": rp.Mesh(pp=2, rank_dp=(2, 1)), **changes})
    assert [fault for fault in rp.faults(run) if says in fault], rp.faults(run)


def tokens(step, microbatch, dp):
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + dp)
    x = torch.randint(256, (2, 8), generator=generator)
    y = torch.randint(256, (2, 8), generator=generator)
    y[:, 1 + (step + microbatch) % 7 :] = -100
    return x, y


@pytest.mark.parametrize("share", [0.5, 0.9, None])
@pytest.mark.parametrize("name", ["tp 2-1", "tp 1-2"])
def test_members_of_a_stage_update_alike_before_all_have_told_their_norms(name, share):
    """Muon sums matrices over tensor ranks, so that all of them, or none, may update as if nothing were clipped."""
    run = replace(RUN, mesh=MESHES[name], data=rp.Batches(tokens), microbatches=4, optim=rp.Muon(lr=0.01), clip=None)

    def trained(clip, flush_every):
        team = Team.of(replace(run, clip=clip, flush_every=flush_every))
        if flush_every is None:
            return [team.step(0), team.step(1)][0][0].grad_norm, team.weights()
        results = team.each(lambda actor: actor.train(0, None, 0, 2))
        assert not [result for result in results if isinstance(result, Exception)], results
        return None, team.weights()

    norm, weights = trained(None, None)
    if share is not None:
        _, weights = trained(clip := norm * share, None)
    _, found = trained(None if share is None else clip, 2)
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
