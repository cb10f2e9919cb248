"""Groups of weights by patterns of their names: which rate, which weight decay, which optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raypar.actors.optim.groups import Rule, optimizer_patterns, rule_of
from raypar.actors.optim.optimizer import build_optimizer, set_lr
from raypar.actors.specs.optim import SGD, AdamW, Muon


def test_weights_of_two_dims_decay_unless_a_pattern_names_them():
    spec = AdamW(weight_decay=0.5, no_decay=("*.norm.*", "embed.?"))
    decays = {name: rule_of(spec, name, 2).weight_decay for name in ("a.norm.w", "norm.w", "embed.w", "embed.ww")}
    assert decays == {"a.norm.w": 0.0, "norm.w": 0.5, "embed.w": 0.0, "embed.ww": 0.5}
    assert rule_of(spec, "norm.b", 1).weight_decay == 0.0


def test_the_first_pattern_that_matches_gives_the_rate():
    spec = SGD(rates={"blocks.[01].*": 0.5, "blocks.*": 2.0, "head.*": 0})
    rates = [rule_of(spec, name, 2).rate for name in ("blocks.1.w", "blocks.2.w", "head.w", "embed.w")]
    assert rates == [0.5, 2.0, 0, 1.0]


def test_muon_leaves_to_adamw_what_is_named_and_what_is_no_matrix():
    spec = Muon(lr=0.02, adamw_lr=0.002, rates={"head.*": 0.5})
    assert rule_of(spec, "blocks.0.w", 2) == Rule("muon", 1.0, 0.1)
    assert rule_of(spec, "blocks.0.b", 1) == Rule("adamw", 0.1, 0.0)
    assert rule_of(spec, "blocks.0.experts", 3) == Rule("adamw", 0.1, 0.1)
    assert rule_of(spec, "head.w", 2) == Rule("adamw", 0.05, 0.1)
    assert rule_of(Muon(), "embed.w", 2) == Rule("adamw", 1.0, 0.1)


def test_all_patterns_are_told():
    spec = Muon(no_decay=("a",), rates={"b": 1.0}, adamw=("c", "d"))
    assert [*optimizer_patterns(spec)] == [("no_decay", "a"), ("rates", "b"), ("adamw", "c"), ("adamw", "d")]
    assert not [*optimizer_patterns(AdamW())]


@pytest.mark.parametrize("spec", [AdamW, SGD, Muon])
def test_a_group_moves_by_its_share_of_the_rate(spec):
    """A weight that moves at half the rate moves half as far, and one at rate 0 not at all."""
    names = ("blocks.0.w", "blocks.1.w", "blocks.2.w")
    weights = {name: nn.Parameter(torch.eye(4)) for name in names}
    optimizer = build_optimizer(spec(weight_decay=0.0, rates={"*.1.*": 0.5, "*.2.*": 0.0}), weights)
    set_lr(optimizer, 0.125)
    for weight in weights.values():
        weight.grad = torch.eye(4)
    optimizer.step()
    whole, half, none = (float((weights[name].detach() - torch.eye(4)).norm()) for name in names)
    assert whole > 0.01
    assert half == pytest.approx(whole / 2, rel=1e-5)  # Muon's bf16 products differ by rounding
    assert none == 0


@pytest.mark.parametrize("spec", [AdamW, SGD])
def test_groups_do_not_change_the_bits_of_others(spec):
    plain, grouped = ({name: nn.Parameter(torch.ones(3, 3)) for name in ("a.w", "b.w")} for _ in range(2))
    for weights, settings in ((plain, {}), (grouped, {"rates": {"b.*": 3.0}, "no_decay": ("b.*",)})):
        optimizer = build_optimizer(spec(lr=0.3, weight_decay=0.1, **settings), weights)
        for _ in range(3):
            for weight in weights.values():
                weight.grad = weight.detach().cos()
            set_lr(optimizer, 0.3)
            optimizer.step()
    assert torch.equal(plain["a.w"], grouped["a.w"])
    assert not torch.equal(plain["b.w"], grouped["b.w"])
