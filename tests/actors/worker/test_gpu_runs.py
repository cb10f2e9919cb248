"""Runs on GPUs, without one: on a device of torch's that is pretended, and over NCCL played by threads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raypar.actors.collective.errors import GroupError
from raypar.actors.errors import ActionError
from raypar.actors.machine.device import ComputeDevice, Cuda
from raypar.actors.pipeline.p2p import Courier
from raypar.actors.specs.optim import AdamW
from tests.gpu.nccl_team import nccl_teams
from tests.support.local_groups import LocalGroup, LocalHub
from tests.support.team import Team, linears

ROOT = Path(__file__).parents[3]
CLOSE = 2e-6  # relative; norms, attention and RMSNorm have other kernels for the pretended device

# --- on a device of its own ------------------------------------------------------------------------------------------


def pretend(every):
    """What tests/gpu/pretend.py finds for one of so many layouts; a process of its own, for it registers a device."""
    command = [sys.executable, "-m", "tests.gpu.pretend", str(every)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def pretended():
    """What is found for some layouts: of one rank, and of a GPT in a pipeline."""
    return pretend(8)


def test_no_tensor_of_the_host_meets_one_of_the_device_and_the_numbers_are_the_cpus(pretended):
    assert set(pretended["differences"]) == {"pp=1", "gpt"}
    assert_the_same(pretended)


@pytest.mark.long
def test_so_it_is_for_all_layouts():
    found = pretend(1)
    assert len(found["differences"]) == 13
    assert_the_same(found)
    assert {size: len(counts) for size, counts in found["ops"].items()} == {
        f"{kind} {width}": 3 for kind in ("fp32", "bf16", "fp16") for width in (16, 256)
    }
    assert_no_op_a_parameter(found)
    assert len(found["reads"]) == 3
    assert_one_read(found)


def assert_the_same(pretended):
    """Assert that every layout has the CPU's numbers, and nothing in a wrong place.

    Norms, and so clipped gradients, differ by rounding: each kind of device adds them in an order of its own.
    """
    for layout, (worst, misplaced) in pretended["differences"].items():
        assert worst <= CLOSE, layout
        assert not misplaced, layout


def test_the_end_of_a_step_launches_nothing_for_each_parameter(pretended):
    assert_no_op_a_parameter(pretended)


def test_blocks_of_gradients_have_their_norms(pretended):
    assert pretended["norms"] < 1e-6


def assert_no_op_a_parameter(pretended):
    """Assert that the begin, the STEP and the end have equal numbers of ops for all numbers of layers."""
    for width, (few, *more) in pretended["ops"].items():
        begin, end_of_step, end = few
        assert begin == end == 0
        assert 0 < end_of_step <= 60, width
        assert all(few == one for one in more), width


def test_recomputing_draws_the_same_dropout(pretended):
    assert pretended["recomputed"]


def test_the_host_waits_for_nothing_before_the_end_of_a_step(pretended):
    assert_one_read(pretended)


def assert_one_read(pretended):
    """Assert that the host of one rank reads once a step, the norms: its losses are on the host by then."""
    for precision, reads in pretended["reads"].items():
        assert reads.pop("STEP") == 1, precision
        assert len(reads) == 8
        assert set(reads.values()) == {0}, precision


def test_the_host_does_not_wait_for_the_loads_of_experts_that_are_all_on_one_gpu(pretended):
    for model, reads in pretended["reads with experts"].items():
        assert reads.pop("STEP") == 1, model
        assert len(reads) == 8 and set(reads.values()) == {0}, model


def test_divided_experts_read_once_a_layer_s_forward_and_with_a_capacity_never(pretended):
    """In an evaluation of two actors, with four layers and two microbatches; each waits once for its end."""
    found = pretended["reads with divided experts"]
    assert found["gates"] == {"tolist": 2 * 4 * 2, "synchronize": 2}
    assert found["capacity"] == {"synchronize": 2}


def test_the_host_of_a_replica_waits_for_its_messages_and_reads_the_norms(pretended):
    """The use of all buckets comes with one wait; another is for the end of the step."""
    for found in pretended["reads of replicas"].values():
        assert found == {"synchronize": 2 * 2, "aten._to_copy.default": 2}


def test_what_is_measured(pretended):
    assert pretended["times"] == {"within": True, "buckets": 8, "busy": True, "overlap": True, "peak": 12345}


# --- over NCCL -------------------------------------------------------------------------------------------------------


@pytest.fixture
def over_nccl():
    """Makes NcclTeams, and closes them."""
    with nccl_teams() as make:
        yield make


@pytest.mark.sampled
@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 3},
        {"pp": 2, "schedule": "interleaved"},
        {"pp": 2, "dp": 2, "zero": 0, "clip": 0.5},
        {"pp": 2, "dp": 2, "zero": 1, "optim": AdamW(lr=0.01)},
        {"pp": 1, "dp": 2, "data_parallel": "parameter_server"},
    ],
)
def test_edges_without_tags_bring_everything_where_it_belongs(over_nccl, layout):
    ours, theirs = over_nccl(linears(6), **layout), Team(linears(6), **layout)
    for team in (ours, theirs):
        for number in range(2):
            team.step(number)
    other = theirs.weights()
    assert all(torch.equal(weight, other[name]) for name, weight in ours.weights().items())


def test_the_edges_of_a_run_are_connected_before_its_first_step(over_nccl):
    team = over_nccl(linears(6), 3)
    before = [set(group._edges) for group in team.groups["pp/0"]]
    assert before == [{(0, 1), (1, 0)}, {(0, 1), (1, 0), (1, 2), (2, 1)}, {(1, 2), (2, 1)}], "and no more than those"
    team.step(0)
    assert [set(group._edges) for group in team.groups["pp/0"]] == before


def test_what_the_host_needs_at_once_goes_through_the_host(over_nccl):
    team = over_nccl(linears(4), 2, dp=2, zero=0)
    team.step(0)
    norms = team.groups["pp/0"][0].host.ledger.entries()["pp", "all_reduce"]
    assert norms.calls == 1
    assert ("pp", "all_reduce") not in team.groups["pp/0"][0].ledger.entries()
    assert ("pp", "send shapes") in team.groups["pp/0"][0].host.ledger.entries()


class Doubtful(LocalGroup):
    """As on a GPU: waits succeed, and only ``synchronize`` knows that an op has failed: each of the kind ``lost``."""

    lost, issued = None, frozenset()

    def _run(self, op, *rest, **options):
        self.issued |= {op}
        return super()._run(op, *rest, **options)

    def synchronize(self, timeout=None):
        if self.lost in self.issued:
            raise self.fault(self.lost, None, "the peer is gone")


SERVERS = {"data_parallel": "parameter_server"}


@pytest.mark.parametrize(
    ("mode", "lost"),
    [({"zero": 0}, "all_reduce"), ({"zero": 1}, "reduce_scatter"), (SERVERS, "reduce"), (SERVERS, "broadcast")],
)
def test_what_a_failed_transfer_left_reaches_no_weight(mode, lost):
    class DoubtfulTeam(Team):
        def _groups(self):
            for name, members in super()._groups():
                hub = LocalHub()
                yield name, [Doubtful(hub, one.axis, one.rank, one.size, 5.0) for one in members]

    team = DoubtfulTeam(linears(4), 1, dp=2, **mode)
    team.step(0)
    kept = team.workers if lost == "broadcast" else team.all  # what servers send they have taken already
    before = [weight.clone() for actor in kept for weight in actor.parameters().values()]
    for members in team.groups.values():
        doubting = members[-1:] if (mode, lost) == (SERVERS, "reduce") else members  # of those the server is the last
        for group in doubting:
            group.lost, group.issued = lost, frozenset()
    errors = team.each(lambda actor: actor.train(1))
    assert all(isinstance(error, ActionError) and error.secondary for error in errors)
    assert any(error.reason.startswith("the peer is gone, in the ") for error in errors)
    after = [weight for actor in kept for weight in actor.parameters().values()]
    assert all(map(torch.equal, before, after))


def test_a_gpu_group_takes_its_cpu_group_with_it(over_nccl):
    team = over_nccl(linears(4), 2)
    group = team.groups["pp/0"][0]
    group.abort()
    with pytest.raises(GroupError, match="closed after an earlier fault"):
        group.host.barrier()


def test_receives_are_posted_ahead_from_the_second_step_on(monkeypatch):
    """In the first one a GPU loads its kernels; here a host posts them as a GPU does."""
    expected = []
    monkeypatch.setattr(Courier, "expect", lambda self, action: expected.append(action))
    monkeypatch.setattr(ComputeDevice, "ahead", Cuda.ahead)
    team = Team(linears(4), 2)
    team.step(0)
    team.step(0, "evaluate")
    assert expected == [], "of each program"
    team.step(1)
    assert len(expected) == 8
