"""ZeRO stage 1: each replica updates its own part of the weights; what is computed is in test_replicas."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

import pytest
import torch
from torch import nn

from raypar.actors.specs.optim import AdamW
from raypar.errors import ConfigError
from tests.support.replicas import agrees
from tests.support.team import Team, linears

ELEMENT = 4  # bytes of fp32


@pytest.mark.sampled
@pytest.mark.parametrize(("pp", "dp"), [(1, 2), (2, 2), (1, 3), (2, 3)])
def test_each_element_has_one_replica_that_updates_it_and_its_gradient_and_state_are_there_alone(pp, dp):
    team = Team(
        lambda: [nn.Sequential(nn.Linear(4, 40), nn.Linear(40, 4)) for _ in range(4)],
        pp,
        2,
        dp=dp,
        zero=1,
        optim=AdamW(lr=0.01),
    )
    team.step(0)
    for stage in range(pp):
        replicas = [team.all[rank] for rank in team.world.replicas_of(stage)]
        held, spans = replicas[0].member.state.parameters, defaultdict(list)
        for worker in replicas:
            updates = {name: shard.elements for name, shard in worker.member.state.updates().items()}
            assert {name for name in worker.holds() if worker.gradient(name) is not None} == updates.keys()
            counts = [stop - start for start, stop in updates.values()]
            states = worker.member.parts.update._updater._optimizer.state.values()
            assert sorted(counts) == sorted(state["exp_avg"].numel() for state in states)
            assert 0 < sum(counts) <= sum(p.numel() for p in held.values()) / dp + 64 * len(held)
            for name, span in updates.items():
                spans[name].append(span)
        assert spans.keys() == held.keys()
        for name, found in spans.items():
            starts, stops = zip(*sorted(found), strict=True)
            assert (0, *stops) == (*starts, held[name].numel()), name


@pytest.mark.parametrize("dp", [2, 3])
def test_it_moves_what_an_all_reduce_does(dp):
    """All replicas together: every gradient (and its bucket's flags) dp - 1 times, and every weight as often."""
    team = Team(linears(4), 1, 4, dp=dp, zero=1, bucket_mb=1e-4)
    weights, tensors = 4 * (16 + 4), 4 * 2  # all of a block or less, so each has a flag of one replica
    before = team.ledger("dp")
    team.step(0)
    moved = {"reduce": 0, "reduce_scatter": 0, "all_gather": 0}
    for old, new in zip(before, team.ledger("dp"), strict=True):
        sent = new["all_reduce"][1] - old.get("all_reduce", (0, 0))[1]
        assert sent == 2 * (dp - 1) * 8 * 23 // dp, "only the norm, whatever the weights are"
        for op in moved:
            moved[op] += new[op][1] - old.get(op, (0, 0))[1]
    assert moved["reduce"] == (dp - 1) * 3 * 8, "the ballot"
    assert moved["reduce_scatter"] == (dp - 1) * (weights + tensors) * ELEMENT
    assert moved["all_gather"] == (dp - 1) * weights * ELEMENT


def test_more_replicas_than_weights():
    agrees(Team(lambda: [nn.Linear(4, 4, bias=False)], 1, 2, dp=3, zero=1))


def test_without_replicas_it_changes_nothing():
    team = Team(linears(2), 2, 2, zero=1)
    assert not team.world.sharded
    agrees(team, bound=0.0)
    assert not team.ledger("mesh")[0]


class Aliased(nn.Module):
    """Its weight's memory is a buffer's, too."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("alias", self.inner.weight.detach())

    def forward(self, x):
        return self.inner(x) + x @ self.alias


class Packed(nn.Module):
    """Weights side by side in one piece of memory, ``apart`` elements from start to start."""

    def __init__(self, apart):
        super().__init__()
        memory = torch.randn(16 + apart)
        self.one, self.other = nn.Parameter(memory[:16].view(4, 4)), nn.Parameter(memory[apart:][:16].view(4, 4))

    def forward(self, x):
        return (x @ self.one).sin() @ self.other


@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize("layer", [Aliased, lambda: Packed(16)], ids=["alias", "packed"])
def test_a_weight_whose_memory_is_shared_stays_where_it_is(layer, offload):
    """Were it moved, its alias would keep the initial values."""
    team = Team(lambda: [nn.Linear(4, 4), layer()], 1, 2, dp=2, zero=1, offload=offload)
    agrees(team)
    layers = [worker.member.parts.part.stages[0].modules[1] for worker in team.workers]
    for tensors in ({**dict(layer.named_parameters()), **dict(layer.named_buffers())} for layer in layers):
        assert any(
            a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
            for a, b in combinations(tensors.values(), 2)
        )


@pytest.mark.parametrize("offload", ["none", "optimizer", "parameters"])
def test_weights_that_overlap_are_refused(offload):
    agrees(Team(lambda: [Packed(8)], 1, 2, dp=2, zero=0))
    with pytest.raises(ConfigError, match=r"layers\.0\.one and layers\.0\.other overlap in memory, and each replica"):
        Team(lambda: [Packed(8)], 1, 2, dp=2, zero=1, offload=offload)


class Nested(nn.Module):
    """Between the starts of two weights that overlap there is a third one, in a gap of the first."""

    def __init__(self):
        super().__init__()
        memory = torch.randn(4, 8)
        self.a, self.b, self.c = (nn.Parameter(part) for part in (memory[:, :2], memory[0, 2:6], memory[1:, 1:8]))


def test_weights_that_overlap_are_found_wherever_others_are():
    with pytest.raises(ConfigError, match=r"layers\.0\.a and layers\.0\.c overlap in memory"):
        Team(lambda: [Nested()], 1, 2, dp=2, zero=1)


class Sliced(nn.Module):
    """Its weights are columns of one matrix: what one has lies between what the other has."""

    def __init__(self):
        super().__init__()
        memory = torch.randn(4, 8)
        self.one, self.other = nn.Parameter(memory[:, :4]), nn.Parameter(memory[:, 4:])

    def forward(self, x):
        return (x @ self.one).sin() @ self.other


def test_weights_that_lie_between_one_another_do_not_overlap():
    team = Team(lambda: [Sliced()], 1, 2, dp=2, zero=1)
    agrees(team)


class Unregistered(nn.Module):
    """Its weight's memory is that of an attribute, too, that torch does not know of."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.alias = self.inner.weight.detach()

    def forward(self, x):
        return self.inner(x) + x @ self.alias


@pytest.mark.parametrize("zero", [0, 1])
def test_an_attribute_that_shares_a_weights_memory_sees_its_updates(zero):
    agrees(Team(lambda: [Unregistered(), nn.Linear(4, 4)], 1, 2, dp=2, zero=zero))


class Strided(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8)[::2, ::2])

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize("zero", [0, 1])
def test_a_weight_with_gaps_in_its_memory(zero):
    agrees(Team(lambda: [Strided()], 1, 2, dp=2, zero=zero, optim=AdamW(lr=0.01)), bound=1e-5)
