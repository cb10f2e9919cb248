"""For every schedule, the bytes that its actors really hold beside what the prover and the planner say."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import raypar as rp
from raypar.planner.memory.worker import worker_memory
from raypar.planner.prediction import from_flops
from raypar.planner.sizes.sized_run import SizedRun
from raypar.schedules.catalog import CATALOG
from raypar.schedules.simulation.memory import peaks
from raypar.schedules.simulation.simulate import simulate
from tests.support.counted import threads
from tests.support.held_bytes import Held
from tests.support.team import Team
from tests.support.thinned import thinned

SIZES = {"layers": 4, "hidden": 16, "heads": 2, "seq": 16, "vocab": 256}
RUN = rp.Run(model=rp.GPT(**SIZES), data=rp.Text(), mesh=rp.Mesh(pp=2), microbatches=4, steps=2, timeout=20.0)
SYNCHRONOUS = [name for name, entry in CATALOG.items() if not (entry.forward_only or entry.is_stream)]
TWICE = {"schedule": "dualpipe", "mesh": rp.Mesh(pp=2, rank_dp=(2, 2)), "microbatches": 8}
STREAMS = {
    "pipedream": {"schedule": "pipedream", "microbatches": 1},
    "pipedream-vertical": {"schedule": "pipedream-vertical", "microbatches": 1},
    "pipedream-2bw": {"schedule": "pipedream-2bw", "microbatches": 2},
    "1F1B-RR": {"schedule": "pipedream", "mesh": rp.Mesh(pp=3, rank_dp=(1, 2, 1)), "microbatches": 2},
    "without a flush": {"schedule": "zb-h2", "flush_every": 3},
}
FAR = 0.005
FARTHER = {"stages in full": 0.025, "selective": 0.06, "half precision": 0.02}  # made again in an I; norms on CPUs


@pytest.fixture(autouse=True)
def one_thread():
    with threads(1):
        yield


def held_by(run):
    """What each actor held in the second step, or in the second steps up to a flush; and the team."""
    team = Team.of(run)
    length = team.programs["train"].stream
    for number in range(2):
        held = [Held(actor) for actor in team.workers]
        for result in team.each(lambda actor, first=number * length: actor.train(first, None, 0, length)):
            if isinstance(result, Exception):
                raise result
    return team, held


@cache
def sizes(run):
    """Bytes that each stage keeps of a microbatch from F on, and from I on, each on an actor of its own."""
    team, held = held_by(run)
    leaders = [held[rank].activations for rank in range(team.world.size) if team.world.leads(rank)]
    return [[one[f"{stage}{op}0"] for stage, one in enumerate(leaders)] for op in "FI"]


def alone(run, num_stages):
    mesh = rp.Mesh(pp=num_stages, tp=run.mesh.tp)
    plain = {
        "schedule": "naive",
        "backward": "split",
        "chunks": None,
        "flush_every": RUN.flush_every,
        "activations_on_device": None,
    }
    return sizes(replace(run, mesh=mesh, microbatches=1, **plain))


def agrees(run, shared=0.0, far=FAR):
    """Whether each actor held what the prover says, to the byte, and about what the planner says.

    ``shared`` is what part of it microbatches share, which the prover counts for each.
    """
    team, held = held_by(run)
    schedule, world = team.programs["train"], team.world
    kept, deferred = alone(run, schedule.num_stages)
    inputs = [4 * run.micro_batch_size * run.model.seq * run.model.hidden * (stage > 0) for stage in range(len(kept))]
    proved = peaks(simulate(schedule), [0] * len(kept), kept, deferred=deferred, inputs=inputs)
    found = [max(one.activations.values()) for one in held]
    of_rows = [proved[world.row(rank)].activations for rank in range(world.size)]
    assert found == (pytest.approx(of_rows, rel=shared) if shared else of_rows)
    sized = SizedRun.of(run, schedule)
    planned = worker_memory(sized, from_flops(sized).timeline)
    logits = 8 * run.micro_batch_size * run.model.seq * run.model.vocab // run.mesh.tensor_ranks  # come and go in a B
    for pp, memory in enumerate(planned):
        ranks = [rank for rank in range(world.size) if world.pp(rank) == pp]
        most = max(found[rank] for rank in ranks)
        passing = logits if pp == schedule.placement[-1] else 0
        assert most * (1 - far) <= memory.activations <= most * (1 + far) + passing
        if schedule.stream:
            assert max(max(held[rank].weights) for rank in ranks) == memory.weights + memory.versions


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("backward", ["whole", "split"])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_schedule_holds_what_is_said(name, backward):
    agrees(replace(RUN, **{"schedule": name, "backward": backward} | (TWICE if name == "dualpipe" else {})))


@pytest.mark.sampled
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_holds_what_is_said_and_as_many_versions_of_weights(name):
    agrees(replace(RUN, **{"steps": 12, "clip": None} | STREAMS[name]))


MORE = {
    "stages in full": {"recompute": "full"},
    "tensor parallelism": {"mesh": rp.Mesh(pp=2, tp=2)},
    "sequence parallelism": {"mesh": rp.Mesh(pp=2, tp=2), "sequence_parallel": True},
    "a grid": {"mesh": rp.Mesh(pp=2, tp="2d:2x2"), "micro_batch_size": 4},
    "a Llama": {"model": rp.Llama(**SIZES, kv_heads=1), "mesh": rp.Mesh(pp=4)},
    "experts": {"model": rp.GPT(**SIZES, moe=rp.MoE(experts=4))},
    "selective": {"model": rp.GPT(**SIZES, dropout=0.1), "recompute": "selective"},
    "half precision": {"precision": rp.Precision("bf16")},
    "host memory": {"activations_on_device": 3},
    "host memory, whole": {"schedule": "gpipe", "backward": "whole", "activations_on_device": 2},
}


@pytest.mark.parametrize("name", thinned(MORE, lambda name: name in ("stages in full", "tensor parallelism")))
def test_a_W_leaves_behind_what_is_said(name):
    shared = {"a Llama": 0.01}.get(name, 0.0)  # the tables of its positions
    agrees(replace(RUN, **{"schedule": "zb-h2", "backward": "split"} | MORE[name]), shared, FARTHER.get(name, FAR))
