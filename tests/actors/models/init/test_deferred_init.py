"""Building a model without its weights, and making the weights of some layers: the same bits whichever they are."""

from __future__ import annotations

import logging
import math
import random
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.init import orthogonal_, trunc_normal_  # users import them by name

from raypar.actors.models.init.deferred_init import record, seeded
from raypar.actors.models.own.user_layers import LayersModel
from raypar.actors.rng import derive
from raypar.actors.specs.model import Layers
from tests.support.own_layers import own_generator


class Rope(nn.Module):
    """Buffers made by arithmetic, as in a rotary embedding and a causal mask, and constants."""

    def __init__(self, d=16, n=32):
        super().__init__()
        inverse = 1.0 / (10000 ** (torch.arange(0, d, 2).float() / d))
        angles = torch.outer(torch.arange(n).float(), inverse)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin())
        self.register_buffer("mask", torch.full((n, n), float("-inf")).triu(1))
        self.register_buffer("tril", torch.tril(torch.ones(n, n, dtype=torch.bool)), persistent=False)
        self.register_buffer("constant", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("mixed", torch.arange(3) * torch.tensor([1.0, 2.0, 3.0]) + torch.tensor(0.5))
        self.register_buffer("slice", torch.linspace(0, 1, 9)[2:7:2])
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def init_by(function):
    def build():
        layers = [nn.Linear(30, 20), nn.Linear(20, 30), nn.Conv1d(4, 4, 3), nn.Linear(4, 4)]
        for layer in layers[:2]:
            function(layer.weight)
        return layers

    return build


def by_dirac():
    layers = [nn.Linear(3, 3), nn.Conv1d(4, 4, 3)]
    nn.init.dirac_(layers[1].weight)
    nn.init.eye_(layers[0].weight)
    return layers


def by_views():
    layers = [nn.Linear(6, 4), nn.Linear(6, 4)]
    for layer in layers:
        with torch.no_grad():
            layer.weight[0].zero_()
            layer.weight[:, 1:3].normal_(5, 0.1)
            layer.weight[2, 3] = 7.0
            layer.weight[layer.weight > 6] = 6
            layer.weight.t()[5].fill_(2)
            layer.bias[torch.tensor([1, 3])] = torch.tensor([8.0, 9.0])
    return layers


def by_numpy():
    layers, shared = [nn.Linear(3, 4) for _ in range(3)], np.empty((4, 3), dtype=np.float32)
    for layer in layers:
        shared[:] = np.random.randn(4, 3)  # one array for all of them, refilled
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(shared))
            layer.bias.fill_(random.random())
    return layers


def by_constants():
    layer, constant, scaled = nn.Linear(3, 4), torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.full((4,), 2.0)
    with torch.no_grad():
        layer.bias.copy_(constant)
        constant.zero_()
        scaled.mul_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    layer.scaled = nn.Buffer(scaled)
    return [nn.Linear(2, 2), layer]


def by_data():
    layers = [nn.Linear(2, 2) for _ in range(2)]
    for layer in layers:
        layer.weight.data = torch.randn(2, 2) * 3
        layer.weight.data.mul_(2)
        layer.bias.data.fill_(4)
    return layers


def by_shape_changes():
    layers = [nn.Linear(2, 3) for _ in range(2)]
    for layer in layers:
        w = torch.arange(6.0).view(2, 3)
        w.t_()
        layer.weight.data.copy_(w)
        w.t_().add_(100)
        layer.twice = nn.Buffer(w.unsqueeze_(0).clone())
    return layers


def by_factorization():
    layers = [nn.Linear(5, 5) for _ in range(2)]
    for layer in layers:
        q, r = torch.linalg.qr(torch.randn(5, 5))
        layer.weight, layer.r = nn.Parameter(q), nn.Buffer(r)
        layer.u = nn.Buffer(torch.linalg.svd(torch.randn(4, 4))[0])
    return layers


def by_state_dict():
    layer = nn.Linear(2, 2)
    layer.load_state_dict({"weight": torch.tensor([[1.0, 2], [3, 4]]), "bias": torch.tensor([1.0, 2])})
    return [nn.Linear(2, 2), layer]


def shared():
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    return [embedding, nn.Linear(4, 4), head]


BUILDS = {
    "linear": lambda: [nn.Linear(4, 5), nn.Linear(5, 6, bias=False), nn.Linear(3, 2, dtype=torch.bfloat16)],
    "norms": lambda: [nn.LayerNorm(4), nn.BatchNorm1d(5), nn.GroupNorm(2, 4), nn.RMSNorm(4)],
    "embedding": lambda: [nn.Embedding(9, 4, padding_idx=0), nn.Embedding(9, 4)],
    "attention": lambda: [nn.MultiheadAttention(8, 2), nn.TransformerEncoderLayer(8, 2)],
    "encoder": lambda: list(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 3).layers),
    "rnn and conv": lambda: [nn.LSTM(3, 4, 2), nn.Conv2d(2, 3, 3)],
    "rope": lambda: [Rope(), Rope(8)],
    "kaiming": init_by(nn.init.kaiming_normal_),
    "xavier": init_by(nn.init.xavier_uniform_),
    "trunc": init_by(lambda weight: trunc_normal_(weight, std=0.02)),
    "trunc narrow": init_by(lambda weight: nn.init.trunc_normal_(weight, std=1.0, a=2.0, b=3.0)),
    "orthogonal": init_by(orthogonal_),
    "sparse": init_by(lambda weight: nn.init.sparse_(weight, 0.5)),
    "dirac": by_dirac,
    "views": by_views,
    "numpy": by_numpy,
    "constants": by_constants,
    "data": by_data,
    "shape changes": by_shape_changes,
    "factorization": by_factorization,
    "state dict": by_state_dict,
    "shared": shared,
    "weight norm": lambda: [nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(2, 2)],
}


def tensors(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def same(module, other):
    mine, theirs = tensors(module), tensors(other)
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        assert not tensor.is_meta, name
        assert torch.equal(tensor, theirs[name]), name
        assert (type(tensor), tensor.requires_grad) == (type(theirs[name]), theirs[name].requires_grad), name


def made(build, chosen=None, seed=0):
    """The layers, those of the numbers ``chosen`` with values (None: all)."""
    layers, recording = record(build, seed)
    recording.materialize([layer for i, layer in enumerate(layers) if chosen is None or i in chosen], seed)
    return layers


# --- the same whichever layers are made ------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("name", BUILDS)
def test_a_layer_has_the_same_bits_whichever_others_are_made(name):
    build = BUILDS[name]
    everything = made(build)
    for number in range(len(everything)):
        alone = made(build, {number})
        same(alone[number], everything[number])
        elsewhere = {id(tensor) for tensor in tensors(alone[number]).values()}
        for other, layer in enumerate(alone):
            left = [tensor for tensor in tensors(layer).values() if id(tensor) not in elsewhere]
            if other != number:
                # only what was made from Python values is there without being asked for
                assert all(t.is_meta or t.numel() <= 3 for t in left), f"layer {other} was made too"


@pytest.mark.parametrize("name", BUILDS)
def test_the_shapes_and_types_are_those_of_a_real_build(name):
    with seeded(0):
        real = BUILDS[name]()
    for layer, wanted in zip(made(BUILDS[name]), real, strict=True):
        found = {n: (t.shape, t.dtype, t.stride(), t.requires_grad) for n, t in tensors(layer).items()}
        assert found == {n: (t.shape, t.dtype, t.stride(), t.requires_grad) for n, t in tensors(wanted).items()}


EXACT = {  # what torch's own generator has no part in: (layer, tensor)
    "rope": [
        (0, "cos"),
        (0, "sin"),
        (1, "mask"),
        (1, "tril"),
        (0, "mixed"),
        (0, "slice"),
        (0, "constant"),
        (1, "scale"),
    ],
    "norms": [(0, "weight"), (1, "weight"), (1, "running_var"), (1, "num_batches_tracked"), (2, "bias"), (3, "weight")],
    "numpy": [(0, "weight"), (1, "weight"), (2, "weight"), (0, "bias"), (2, "bias")],
    "constants": [(1, "bias"), (1, "scaled")],
    "state dict": [(1, "weight"), (1, "bias")],
    "dirac": [(0, "weight"), (1, "weight")],
    "shape changes": [(0, "weight"), (1, "twice")],
}


@pytest.mark.parametrize("name", EXACT)
def test_values_without_torchs_generator_are_those_of_a_real_build(name):
    with seeded(derive(0, "build")):
        real = BUILDS[name]()
    layers = made(BUILDS[name])
    for number, key in EXACT[name]:
        assert torch.equal(tensors(layers[number])[key], tensors(real[number])[key]), (number, key)


def test_a_shared_parameter_stays_one_object():
    layers = made(shared)
    assert layers[0].weight is layers[2].weight
    layers = made(shared, {0, 2})
    assert layers[0].weight is layers[2].weight


def test_seeds_change_the_values_and_builds_repeat():
    for name in ("linear", "trunc", "orthogonal", "numpy", "views"):
        first, again, other = made(BUILDS[name]), made(BUILDS[name]), made(BUILDS[name], seed=1)
        same(first[0], again[0])
        assert not torch.equal(first[0].weight, other[0].weight), name


def test_two_layers_alike_are_drawn_apart():
    layers = made(lambda: [nn.Linear(4, 4), nn.Linear(4, 4)])
    assert not torch.equal(layers[0].weight, layers[1].weight)


# --- distributions ---------------------------------------------------------------------------------------------------

WIDE = 400


@pytest.mark.parametrize(
    ("function", "std"),
    [
        (lambda w: None, 1 / math.sqrt(3 * WIDE)),  # Linear's own: uniform up to 1/sqrt(fan in)
        (lambda w: nn.init.normal_(w, 0.0, 0.02), 0.02),
        (lambda w: trunc_normal_(w, std=0.02), 0.02),
        (lambda w: trunc_normal_(w, std=1.0, a=-1.0, b=1.0), 0.5396),
        (nn.init.kaiming_normal_, math.sqrt(2 / WIDE)),
        (nn.init.xavier_uniform_, math.sqrt(1 / WIDE)),
        (orthogonal_, 1 / math.sqrt(WIDE)),
    ],
)
def test_the_distribution_is_the_one_asked_for(function, std):
    def build():
        layer = nn.Linear(WIDE, WIDE)
        function(layer.weight)
        return [layer]

    weight = made(build)[0].weight
    assert weight.std().item() == pytest.approx(std, rel=0.02)
    assert abs(weight.mean().item()) < 0.02 * std


@pytest.mark.parametrize(("rows", "columns"), [(20, 30), (30, 20)])
def test_orthogonal_is_orthogonal(rows, columns):
    def build():
        layer = nn.Linear(columns, rows)
        orthogonal_(layer.weight)
        return [layer]

    weight = made(build)[0].weight.detach().double()
    product = weight @ weight.T if rows < columns else weight.T @ weight
    assert torch.allclose(product, torch.eye(min(rows, columns), dtype=torch.float64), atol=1e-5)


# --- nothing else is disturbed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["numpy", "trunc", "linear"])
def test_the_global_generators_stay_where_they_are(name):
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), [str(part) for part in np.random.get_state()]

    before, init = states(), nn.init._no_grad_trunc_normal_
    made(BUILDS[name])
    assert states() == before
    assert nn.init._no_grad_trunc_normal_ is init


def test_a_build_that_fails_leaves_nothing_behind():
    before, init = random.getstate(), nn.init._no_grad_trunc_normal_

    def build():
        random.random()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        record(build, 0)
    assert random.getstate() == before
    assert nn.init._no_grad_trunc_normal_ is init
    assert torch.ones(1).device.type == "cpu"


def test_builds_in_several_threads_do_not_mix():
    wanted = made(BUILDS["trunc"])
    with ThreadPoolExecutor(3) as pool:
        for layers in pool.map(lambda _: record(BUILDS["trunc"], 0), range(6)):
            modules, recording = layers
            recording.materialize(modules, 0)
            same(modules[0], wanted[0])
    assert len(wanted[0].state_dict()) > 0


def test_loading_a_state_dict_gives_no_false_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made(by_state_dict)[1].weight.tolist() == [[1, 2], [3, 4]]


# --- functions that need values --------------------------------------------------------------------------------------


def looks(look):
    def build():
        layers = [nn.Linear(6, 4), nn.Linear(4, 3)]
        look(layers[0].weight)
        with torch.no_grad():
            layers[1].weight.mul_(2)
        return layers

    return build


LOOKS = {
    "item": lambda w: w.sum().item(),
    "bool": lambda w: bool((w > 0).any()),
    "tolist": lambda w: w.tolist(),
    "numpy": lambda w: w.detach().numpy(),
    "equal": lambda w: torch.equal(w, w),
    "nonzero": lambda w: w[w > 0],
    "own generator": own_generator,
    "values into a real tensor": lambda w: torch.tensor([1.0, 2.0]).add_(w.detach()[0, :2]),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_function_that_looks_at_values_is_built_for_real_with_the_same_result_for_every_subset(look, caplog):
    spec = Layers(looks(LOOKS[look]), nn.functional.mse_loss)
    with caplog.at_level(logging.INFO, logger="raypar"):
        models = [LayersModel(spec, 3) for _ in range(3)]
    assert "can't be built without its weights" in caplog.text
    both, (first,), (second,) = (
        model.materialize(chosen, 3) for model, chosen in zip(models, ([0, 1], [0], [1]), strict=True)
    )
    same(first, both[0])
    same(second, both[1])
    assert not torch.equal(first.weight, LayersModel(spec, 4).materialize([0], 4)[0].weight) or look == "own generator"


@pytest.mark.parametrize("name", ["trunc", "orthogonal", "rope", "numpy", "state dict"])
def test_common_ways_to_build_need_no_values(name, caplog):
    with caplog.at_level(logging.INFO, logger="raypar"):
        LayersModel(Layers(BUILDS[name], nn.functional.mse_loss), 0)
    assert not caplog.text


# --- tensors that no module has registered ---------------------------------------------------------------------------


class Mixes(nn.Module):
    """Has a tensor that it did not register, and finds it as ``keep`` says."""

    def __init__(self, keep):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        mix = torch.arange(16.0).view(4, 4)
        self.find = None
        if keep == "attribute":
            self.mix = mix
        elif keep == "view of a weight":
            self.mix = self.linear.weight.detach().t()
        elif keep == "list":
            self.mixes = [mix]
        elif keep == "closure":
            self.find = lambda: mix
        elif keep == "list of a weight":
            self.mixes = [self.linear.weight]
        elif keep == "product with a weight":
            self.mix = self.linear.weight * mix

    def forward(self, x):
        if self.find is not None:
            return self.linear(x) @ self.find()
        return self.linear(x) @ (self.mix if hasattr(self, "mix") else self.mixes[0])


KEPT = ("attribute", "view of a weight", "list", "closure", "list of a weight", "product with a weight")


@pytest.mark.parametrize("keep", KEPT)
def test_a_tensor_that_is_not_registered_has_its_values(keep):
    model = LayersModel(Layers(lambda: [nn.Linear(4, 4), Mixes(keep)], nn.functional.mse_loss), 3)
    (mixes,) = model.materialize([1], 3)
    x, weight, bias = torch.ones(2, 4), mixes.linear.weight, mixes.linear.bias
    mix = torch.arange(16.0).view(4, 4)
    wanted = {"view of a weight": weight.t(), "list of a weight": weight, "product with a weight": weight * mix}
    assert torch.equal(mixes(x), (x @ weight.t() + bias) @ wanted.get(keep, mix))


def test_a_tensor_that_is_an_attribute_is_no_reason_to_build_all_of_the_model(caplog):
    with caplog.at_level(logging.INFO, logger="raypar"):
        LayersModel(Layers(lambda: [Mixes("attribute"), Mixes("view of a weight")], nn.functional.mse_loss), 0)
    assert not caplog.text


def sevens(parameter):
    parameter.grad.fill_(7.0)


def test_hooks_and_notes_of_a_parameter_stay_with_it():
    def build():
        layer = nn.Linear(4, 4)
        layer.weight.scale = 2.0
        hooked = nn.Linear(4, 4)
        hooked.weight.register_hook(lambda gradient: 0 * gradient)
        hooked.bias.register_post_accumulate_grad_hook(sevens)
        return [layer, hooked]

    model = LayersModel(Layers(build, nn.functional.mse_loss), 3)
    layer, hooked = model.materialize([0, 1], 3)
    assert layer.weight.scale == 2.0
    hooked(torch.ones(2, 4)).sum().backward()
    assert not hooked.weight.grad.any()
    assert hooked.bias.grad.tolist() == [7.0] * 4


def test_a_parameter_keeps_its_class():
    class Named(nn.Parameter):
        pass

    def build():
        layer = nn.Linear(4, 4)
        layer.weight = Named(layer.weight.data)
        return [layer]

    (layer,) = LayersModel(Layers(build, nn.functional.mse_loss), 3).materialize([0], 3)
    assert type(layer.weight) is Named
