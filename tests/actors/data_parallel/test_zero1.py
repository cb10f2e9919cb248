"""ZeRO stage 1: each replica updates its own part of the weights; what is computed is in test_replicas."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import nn

from raypar.actors.specs.optim import AdamW
from tests.support.replicas import agrees
from tests.support.team import Team, linears

ELEMENT = 4  # bytes of fp32


def owned(worker):
    """The names of the weights that a worker's optimizer updates."""
    ours = {id(parameter): name for name, parameter in worker.member.state.parameters.items()}
    optimizer = worker.member.parts.update._updater._optimizer
    groups = optimizer.param_groups if optimizer else []
    return {ours[id(parameter)] for group in groups for parameter in group["params"]}


@pytest.mark.sampled
@pytest.mark.parametrize(("pp", "dp"), [(1, 2), (2, 2), (1, 3), (2, 3)])
def test_each_weight_has_one_owner_and_its_gradient_and_state_are_there_alone(pp, dp):
    team = Team(linears(6), pp, 2, dp=dp, zero=1, optim=AdamW(lr=0.01))
    team.step(0)
    for stage in range(pp):
        replicas = [team.all[rank] for rank in team.world.replicas_of(stage)]
        shares = [owned(worker) for worker in replicas]
        assert set.union(*shares) == set(replicas[0].holds())
        assert sum(map(len, shares)) == len(replicas[0].holds()), "a weight has two owners"
        assert all(shares), "a replica has nothing to do"
        for worker, share in zip(replicas, shares, strict=True):
            assert {name for name in worker.holds() if worker.gradient(name) is not None} == share
            states = worker.member.parts.update._updater._optimizer.state
            assert len(states) == len(share)


@pytest.mark.parametrize("dp", [2, 3])
def test_it_moves_what_an_all_reduce_does(dp):
    """All replicas together: every gradient (and its bucket's places) dp - 1 times, and every weight as often."""
    team = Team(linears(4), 1, 4, dp=dp, zero=1, bucket_mb=1e-4)
    weights, tensors = 4 * (16 + 4), 4 * 2
    before = team.ledger("dp")
    team.step(0)
    moved = {"reduce": 0, "broadcast": 0}
    for old, new in zip(before, team.ledger("dp"), strict=True):
        assert new.get("all_reduce", (0, 0))[1] - old.get("all_reduce", (0, 0))[1] < 2 * 8 * (tensors + 3), "only norms"
        for op in moved:
            moved[op] += new[op][1] - old.get(op, (0, 0))[1]
    ballot = 3 * 8
    assert moved["reduce"] == (dp - 1) * ((weights + tensors) * ELEMENT + ballot)
    assert moved["broadcast"] == (dp - 1) * weights * ELEMENT


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


@pytest.mark.parametrize("layer", [Aliased, lambda: Packed(16)], ids=["alias", "packed"])
def test_a_weight_whose_memory_is_shared_stays_where_it_is(layer):
    """Were it moved, its alias would keep the initial values."""
    team = Team(lambda: [nn.Linear(4, 4), layer()], 1, 2, dp=2, zero=1)
    agrees(team)
    layers = [worker.member.parts.part.stages[0].modules[1] for worker in team.workers]
    for tensors in ({**dict(layer.named_parameters()), **dict(layer.named_buffers())} for layer in layers):
        assert any(
            a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
            for a, b in combinations(tensors.values(), 2)
        )


def test_weights_that_overlap_are_refused_if_they_have_two_owners():
    agrees(Team(lambda: [Packed(8)], 1, 2, dp=2, zero=0))
    with pytest.raises(ValueError, match=r"layers\.0\.one and layers\.0\.other overlap in memory"):
        Team(lambda: [Packed(8)], 1, 2, dp=2, zero=1)


class Nested(nn.Module):
    """Between the starts of two weights that overlap there is a third one, inside the first."""

    def __init__(self):
        super().__init__()
        memory = torch.randn(24)
        self.a, self.b, self.c = (nn.Parameter(memory[start:end]) for start, end in ((0, 16), (2, 6), (8, 24)))


def test_weights_that_overlap_are_found_wherever_others_are():
    with pytest.raises(ValueError, match=r"layers\.0\.a and layers\.0\.c overlap in memory"):
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
    assert set(team.workers[0].member.parts.part.owners.of.values()) == {0, 1}


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
