"""Muon: orthogonal updates of matrices, held against torch.optim.Muon, and AdamW for the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raypar.actors.optim.muon.muon_with_adamw import orthogonalized, scale_of
from raypar.actors.optim.optimizer import build_optimizer, set_lr
from raypar.actors.specs.optim import AdamW, Muon


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(16, 16), (24, 8), (8, 24), (1, 5)])
def test_singular_values_come_near_one_and_singular_vectors_stay(shape):
    matrix = drawn(*shape)
    found = orthogonalized(matrix, 5, torch.float32)
    values = torch.linalg.svdvals(found)
    assert 0.6 < values.min() <= values.max() < 1.25
    one, _, other = torch.linalg.svd(matrix, full_matrices=False)
    assert ((found - one @ other).norm() / (one @ other).norm()) < 0.35
    assert found.shape == matrix.shape


def test_a_matrix_of_zeros_stays_one_and_the_given_one_is_not_changed():
    assert not orthogonalized(torch.zeros(4, 3), 5, torch.float32).any()
    matrix = drawn(4, 3)
    before = matrix.clone()
    orthogonalized(matrix, 5, torch.float32)
    assert torch.equal(matrix, before)


def test_scales():
    assert scale_of("original", 64, 16) == 2.0
    assert scale_of("original", 16, 64) == 1.0
    assert scale_of("match_rms_adamw", 16, 64) == pytest.approx(1.6)


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_in_bfloat16_it_has_the_bits_of_torchs(scale, nesterov):
    spec = Muon(lr=0.02, weight_decay=0.1, momentum=0.9, precision="bf16", scale=scale, nesterov=nesterov)
    ours = [nn.Parameter(drawn(*shape)) for shape in ((8, 8), (12, 6), (6, 12))]
    theirs = [nn.Parameter(weight.detach().clone()) for weight in ours]
    wanted = torch.optim.Muon(theirs, 0.02, 0.1, 0.9, nesterov=nesterov, adjust_lr_fn=scale)
    optimizer = build_optimizer(spec, {f"blocks.{index}.weight": weight for index, weight in enumerate(ours)})
    for step in range(3):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            one.grad = drawn(*one.shape, seed=10 * step + index)
            other.grad = one.grad.clone()
        optimizer.step()
        wanted.step()
    assert all(map(torch.equal, ours, theirs))


def test_in_float32_noise_of_a_gradient_stays_noise():
    """Of a matrix of low rank too, all of whose small singular values are noise."""
    matrix = drawn(64, 4) @ drawn(4, 48, seed=1)
    noisy = matrix * (1 + 1e-7 * drawn(64, 48, seed=2))
    one, other = orthogonalized(matrix, 5, torch.float32), orthogonalized(noisy, 5, torch.float32)
    assert (one - other).norm() < 1e-4 * one.norm()


def model():
    shapes = {"embed.weight": (5, 4), "blocks.0.up": (6, 4), "blocks.0.bias": (6,), "conv": (2, 2, 2), "head.w": (5, 4)}
    return {name: nn.Parameter(drawn(*shape)) for name, shape in shapes.items()}


def test_what_is_no_hidden_matrix_is_adamws():
    ours, theirs = model(), model()
    spec = Muon(lr=1e-2, adamw_lr=1e-3, adamw_betas=(0.8, 0.9), adamw_eps=1e-3)
    alone = AdamW(lr=1e-3, betas=(0.8, 0.9), eps=1e-3, weight_decay=spec.weight_decay)
    mine, adamw = build_optimizer(spec, ours), build_optimizer(alone, theirs)
    set_lr(mine, 1e-2)
    set_lr(adamw, 1e-3)
    for weights, optimizer in ((ours, mine), (theirs, adamw)):
        for weight in weights.values():
            weight.grad = weight.detach().sin()
        optimizer.step()
    assert {name for name in ours if not torch.equal(ours[name], theirs[name])} == {"blocks.0.up"}
    assert {*mine.state[ours["blocks.0.up"]]} == {"momentum_buffer"}


def test_a_matrix_without_a_gradient_is_left_alone():
    weights = model()
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizer = build_optimizer(Muon(), weights)
    optimizer.step()
    assert all(torch.equal(weight, before[name]) for name, weight in weights.items())
    assert not any(optimizer.state.values())


def test_matrices_alone_need_no_adamw():
    weight = nn.Parameter(drawn(4, 4))
    weight.grad = drawn(4, 4, seed=1)
    optimizer = build_optimizer(Muon(), {"blocks.0.up": weight})
    optimizer.step()
    assert len(optimizer.param_groups) == 1
