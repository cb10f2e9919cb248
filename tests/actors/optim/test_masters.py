"""fp32 masters of half-precision weights keep what half precision would lose, and are nothing more in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raypar.actors.machine.offload_storage import DeviceStorage
from raypar.actors.models.init.cast import cast
from raypar.actors.optim.masters import masters_of
from raypar.actors.optim.optimizer import build_optimizer
from raypar.actors.specs.optim import SGD, AdamW
from raypar.actors.specs.precision import Precision


def made(precision, layer):
    layers = [layer]
    parameters = dict(layer.named_parameters())
    return parameters, masters_of(precision, DeviceStorage(torch.device("cpu")), layers, parameters)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_masters_keep_updates_that_half_precision_loses(compute):
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    (weight,), masters = layer.parameters(), made(Precision(compute), layer)[1]
    optimizer = build_optimizer(SGD(lr=1.0, momentum=0.0), masters.parameters)
    alone = weight.detach().clone()
    for _ in range(16):
        weight.grad = torch.full((1, 1), -(2.0**-12))
        masters.take_gradients()
        optimizer.step()
        masters.publish()
        alone += torch.tensor(2.0**-12, dtype=alone.dtype)
    assert masters.parameters["weight"].item() == 1 + 16 * 2**-12
    assert weight.dtype == alone.dtype != torch.float32
    assert weight.item() == float(torch.tensor(1 + 2**-8).to(weight.dtype))
    assert float(alone) == 1.0, "without a master each update is rounded away"


@pytest.mark.parametrize(("eps", "is_fine"), [(1e-8, False), (1e-4, True)])
def test_an_eps_that_is_0_in_fp16_ends_a_run_with_fp16_states(eps, is_fine):
    """A gradient of 2^-14 has a square of 0 there, so Adam divides by 0 + eps; a step should not exceed the rate."""
    layer = nn.Linear(1, 1, bias=False).half()
    nn.init.zeros_(layer.weight)
    optimizer = build_optimizer(AdamW(lr=1e-3, eps=eps), dict(layer.named_parameters()))
    for gradient in (2.0**-14, 0.0):
        layer.weight.grad = torch.full_like(layer.weight, gradient)
        optimizer.step()
    assert (layer.weight.abs().item() <= 2e-3) == is_fine


def test_in_fp32_the_weights_are_the_masters():
    layer = nn.Linear(2, 2)
    parameters, masters = made(Precision(), layer)
    assert all(masters.parameters[name] is parameter for name, parameter in parameters.items())
    gradient = layer.weight.grad = torch.ones(2, 2)
    masters.take_gradients()
    masters.publish()
    assert layer.weight.grad is gradient
    masters.take_gradients(0.25)
    assert layer.weight.grad is gradient
    assert float(gradient[0, 0]) == 0.25


def test_masters_have_the_bits_of_the_fp32_weights_and_gradients_are_added_in_fp32():
    layer = nn.Linear(3, 2)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    _, masters = made(Precision("bf16"), layer)
    assert all(torch.equal(masters.parameters[name], wanted) for name, wanted in before.items())
    for value in (1.0, 2.0**-10):  # in bf16 the second would be lost
        layer(torch.full((1, 3), value, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert torch.equal(layer.weight.grad, torch.full((2, 3), 1 + 2.0**-10))
    gradient = layer.weight.grad
    masters.take_gradients()
    assert masters.parameters["weight"].grad is gradient, "of one dtype, so not copied"


def test_with_half_masters_there_is_no_second_copy():
    layer = nn.Linear(3, 2)
    parameters, masters = made(Precision("bf16", reduce="bf16", master="bf16"), layer)
    assert all(masters.parameters[name] is parameter for name, parameter in parameters.items())


def test_what_shares_memory_shares_it_after_the_cast_and_batch_norms_stay():
    layer, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
    layer.register_buffer("turned", layer.weight.detach().t())
    cast([nn.Sequential(layer, norm)], torch.bfloat16, torch.float32)
    with torch.no_grad():
        layer.weight.fill_(3.0)
    assert (layer.turned == 3.0).all()
    assert layer.turned.dtype == torch.bfloat16
    assert {p.dtype for p in norm.state_dict().values()} == {torch.float32, torch.int64}
    assert norm(layer(torch.ones(2, 4, dtype=torch.bfloat16))).dtype == torch.bfloat16


def test_adams_states_in_fp16_lose_the_squares_and_make_updates_of_any_size():
    def moved(master):
        layer = nn.Linear(1, 1, bias=False)
        parameters, masters = made(Precision("fp16", reduce="fp16", master=master), layer)
        optimizer = build_optimizer(AdamW(lr=1e-3, eps=1e-8, weight_decay=0.0), masters.parameters)
        before = layer.weight.item()
        for gradient in (1e-4, 0.0):  # the square of the first is 0 in fp16, and so is eps
            parameters["weight"].grad = torch.full((1, 1), gradient, dtype=torch.float16)
            masters.take_gradients()
            optimizer.step()
            masters.publish()
        return abs(layer.weight.item() - before)

    assert torch.tensor(1e-8).half().item() == 0.0
    assert moved("fp32") < 2e-3 + 1e-3
    assert not moved("fp16") < 1.0
