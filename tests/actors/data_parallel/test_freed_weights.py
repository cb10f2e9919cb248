"""ZeRO stage 3 and layers that use weights in unusual ways: the numbers are right, or the error names the weight."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from raypar.actors.errors import ActionError
from raypar.actors.machine import flat_memory
from raypar.errors import ConfigError
from tests.support.replicas import agrees
from tests.support.team import Team


def first(kind, *others):
    return lambda: [kind(), *(nn.Linear(4, 4) for _ in range(2)), *(other() for other in others)]


class Bare(nn.Module):
    """Returns its own weight, whole or in part, whatever it is given."""

    def __init__(self, part=None):
        super().__init__()
        self.weight, self.part = nn.Parameter(torch.randn(3, 4)), part

    def forward(self, x):
        if self.part == "unused":
            return x, self.weight.t()
        return {None: self.weight, "view": self.weight.view(1, 3, 4)[0], "half": self.weight[:2]}[self.part]


class Takes(nn.Module):
    """Adds up two inputs, the second transposed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, y_T):
        return self.linear(x) + y_T.t()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("pp", "part", "changes"), [(1, None, {}), (3, "view", {"zero_gather": "step"}), (3, None, {"recompute": "full"})]
)
def test_a_layer_may_return_its_own_weight(pp, part, changes):
    """It is copied: the memory is freed before the next layer reads it, or before the next actor gets it."""
    agrees(Team(first(lambda: Bare(part)), pp, 2, dp=2, zero=3, **changes))


def test_a_layer_may_return_its_own_weight_beside_something_else():
    fn = lambda: [Bare("unused"), Takes(), nn.Linear(4, 4)]  # noqa: E731
    agrees(Team(fn, 1, 2, dp=2, zero=3))
    assert Team(fn, 1, 2, dp=2, zero=3).step(0, "evaluate")


class Keeps(nn.Module):
    """Saves a view of its weight for the backward of a function of its own, and keeps one between calls."""

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x)
            ctx.weight = weight.t()
            return x @ weight.t()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient @ ctx.weight.t(), gradient.t() @ x

    def __init__(self):
        super().__init__()
        self.weight, self.kept = nn.Parameter(torch.randn(4, 4)), None

    def forward(self, x):
        if self.kept is None:
            self.kept = self.weight.detach()[:1]
        return self.Times.apply(x, self.weight) + self.kept


@pytest.mark.parametrize("placement", [{}, {"zero_gather": "step"}], ids=str)
def test_what_a_layer_keeps_of_its_own_weight_is_there_when_the_layer_is(placement):
    agrees(Team(first(Keeps, Keeps), 1, 3, dp=2, zero=3, **placement))


class Stash(nn.Module):
    """Leaves what it made where a later layer of the same actor finds it, past its outputs."""

    def __init__(self, left, *, takes):
        super().__init__()
        self.linear, self.left, self.takes = nn.Linear(4, 4), left, takes

    def forward(self, x):
        key = threading.get_ident()
        if self.takes:
            return self.linear(x) + self.left.pop(key)
        out = self.linear(x)
        self.left[key] = self.linear(x.sin())
        return out


def stashes():
    left = {}
    return [nn.Linear(4, 4), Stash(left, takes=False), nn.Linear(4, 4), Stash(left, takes=True)]


def test_a_weight_that_the_backward_reads_after_it_was_freed_is_named():
    """Autograd runs a part of layer 1 before it comes to the outputs of layer 1."""
    with pytest.raises(ActionError, match=r"layers\.1\.linear\.weight .*zero 3.*reshard_after_forward") as caught:
        Team(stashes, 1, 2, dp=2, zero=3).step()
    assert "outputs" in str(caught.value)
    agrees(Team(stashes, 1, 2, dp=2, zero=3, reshard_after_forward=False))


class Clamped(nn.Module):
    """Writes into its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.5, 0.5)
        return x @ self.weight


def test_a_layer_that_writes_into_its_weight_is_named():
    """The shards would not change."""
    with pytest.raises(ActionError, match=r"layers\.0\.weight is written to.*zero 3"):
        Team(first(Clamped), 1, 2, dp=2, zero=3).step()


class Views(nn.Module):
    def __init__(self, kind):
        super().__init__()
        memory = torch.randn(24)
        self.one = nn.Parameter(memory[:16].view(4, 4))
        if kind == "weight":
            self.other = nn.Parameter(memory[8:].view(4, 4))
        elif kind == "frozen":
            self.other = nn.Parameter(memory[8:].view(4, 4), requires_grad=False)
        elif kind == "buffer":
            self.register_buffer("other", memory[8:].view(4, 4))
        elif kind == "attribute":
            self.other = self.one.detach().t()
        elif kind == "list":
            self.others = [self.one.detach().t()]
        elif kind == "apart":
            self.other = nn.Parameter(memory[16:].view(2, 4))
        self.kind = kind

    def forward(self, x):
        other = self.others[0] if self.kind == "list" else self.other
        return (x @ self.one).sin() @ (other.t() @ other)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("weight", r"layers\.1\.one and layers\.1\.other"),
        ("frozen", r"layers\.1\.one and layers\.1\.other"),
        ("buffer", r"layers\.1\.one and layers\.1\.other"),
        ("attribute", r"layers\.1\.one and layers\.1\.other"),
        ("list", r"layers\.1\.one and a tensor that layers\.1 does not register"),
    ],
)
def test_weights_that_overlap_are_refused(kind, names):
    """Before any actor starts: what is in a shard has memory of its own."""
    with pytest.raises(ConfigError, match=f"{names} overlap in memory, and zero is 3"):
        Team(lambda: [nn.Linear(4, 4), Views(kind)], 1, 2, dp=2, zero=3)


def test_weights_of_one_memory_that_do_not_overlap_are_sharded():
    agrees(Team(lambda: [nn.Linear(4, 4), Views("apart")], 1, 2, dp=2, zero=3))


def test_a_weight_of_another_layer_is_refused():
    def layers():
        one, other = nn.Linear(4, 4), nn.Linear(4, 4)
        vars(other)["borrowed"] = [one.weight]
        return [one, other]

    with pytest.raises(ConfigError, match=r"layers\.1 uses layers\.0\.weight without registering it, and zero is 3"):
        Team(layers, 1, 2, dp=2, zero=3)


class PassesOn(nn.Module):
    """Hands a second value on as it is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, skip=None):
        return self.linear(x), (x if skip is None else skip)


class Joins(PassesOn):
    def forward(self, x, skip):
        return self.linear(x) + skip


def test_a_value_that_layers_hand_on_gathers_nothing_again():
    def layers():
        return [PassesOn(), PassesOn(), PassesOn(), Joins()]

    team = Team(layers, 1, 2, dp=2, zero=3)
    agrees(team)
    before = team.ledger("dp")[0]["all_gather"][0]
    team.step()
    assert team.ledger("dp")[0]["all_gather"][0] - before == 2 * 2 * 4  # 4 layers, forward and backward, 2 microbatches


def test_where_memory_is_not_mapped_weights_are_freed_and_gathered_too(monkeypatch):
    """As on GPUs: a storage that is resized."""
    monkeypatch.setattr(flat_memory, "has_feature", lambda feature: False)
    agrees(Team(lambda: [nn.Linear(4, 4) for _ in range(3)], 1, 2, dp=2, zero=3))
