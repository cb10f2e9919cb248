"""Experts in the place of a block's MLP, in GPT and Llama."""

from dataclasses import replace

import pytest
import torch

from raypar.actors.models.build import build_model
from raypar.actors.models.moe import MixtureOfExperts as Layer
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.moe import MoE

SIZES = {"layers": 4, "hidden": 16, "heads": 2, "seq": 8, "vocab": 20}


def made(model, seed=0):
    built = build_model(model, seed)
    return built, built.materialize(range(len(built.names)), seed)


def output(layers, ids):
    for layer in layers:
        ids = layer(ids)
    return ids


def ids(batch=3):
    return torch.randint(0, 20, (batch, 8), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", [GPT, Llama])
def test_one_expert_is_the_dense_layer(kind):
    """The same values whatever gates there are, if they are normalised; the MLP's weights are the expert's."""
    model = kind(**SIZES)
    _, dense = made(model)
    _, experts = made(replace(model, moe=MoE(experts=1, top_k=1, normalise=True)))
    for plain, block in zip(dense, experts, strict=True):
        wanted = {name.replace("mlp.experts.0.", "mlp."): p for name, p in block.named_parameters()}
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                wanted[name].copy_(parameter)
    found, expected = output(experts, ids()), output(dense, ids())
    assert torch.equal(found, expected)
    found.logsumexp(-1).sum().backward()
    expected.logsumexp(-1).sum().backward()
    for plain, block in zip(dense, experts, strict=True):
        ours = {name.replace("mlp.experts.0.", "mlp."): p.grad for name, p in block.named_parameters()}
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(ours[name], parameter.grad)


def test_names_and_initial_values_do_not_depend_on_what_else_is_made():
    model = GPT(**SIZES, moe=MoE(experts=4, gate="sigmoid", bias_rate=0.1, shared=1, every=2))
    built, layers = made(model)
    names = built.parameter_names()
    assert [name for name in names if name.startswith("blocks.1.mlp.experts.3")] == [
        f"blocks.1.mlp.experts.3.{inner}" for inner in ("up.weight", "up.bias", "down.weight", "down.bias")
    ]
    assert {"blocks.1.mlp.router.weight", "blocks.1.mlp.shared.up.weight", "blocks.0.mlp.up.weight"} < set(names)
    assert "blocks.1.mlp.router.bias" not in names
    assert torch.equal(layers[2].mlp.router.bias, torch.zeros(4))
    (alone,) = built.materialize([2], 0)
    for (name, ours), theirs in zip(alone.named_parameters(), layers[2].parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    ups = [expert.up.weight for expert in alone.mlp.experts]
    assert not torch.equal(ups[0], ups[1])
    assert ups[0].std().item() == pytest.approx(0.02, rel=0.15)
    assert alone.mlp.experts[0].down.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.15)


@pytest.mark.parametrize(
    ("moe", "counts"),
    [
        (MoE(experts=4), [4, 4, 4, 4]),
        (MoE(experts=4, every=2), [0, 4, 0, 4]),
        (MoE(experts=4, every=2, first=0), [4, 0, 4, 0]),
        (MoE(experts=(2, 3, 4, 8)), [2, 3, 4, 8]),
        (MoE(experts=(2, 8), every=2), [0, 2, 0, 8]),
        (MoE.glam(), [0, 64, 0, 64]),
    ],
)
def test_which_blocks_have_how_many_experts(moe, counts):
    model = GPT(**SIZES, moe=moe)
    blocks = build_model(model, 0).skeleton[1:-1]
    assert [len(block.mlp.experts) if isinstance(block.mlp, Layer) else 0 for block in blocks] == counts
    assert [model.num_experts(block) for block in range(4)] == counts


def layer_of(**settings):
    torch.manual_seed(0)
    _, layers = made(GPT(**SIZES, moe=MoE(**settings)))
    return layers[1].mlp


def test_shared_experts_are_added():
    layer, x = layer_of(experts=4, width=24, shared=2), torch.randn(2, 8, 16)
    assert layer.shared.up.weight.shape == (48, 16)
    with_them, layer.shared = layer(x), None
    assert not torch.equal(with_them, layer(x))
    assert layer.experts[0].up.weight.shape == (24, 16)


def test_a_residual_mlp_is_mixed_by_a_softmax_over_the_two():
    layer, x = layer_of(experts=4, residual=True), torch.randn(2, 8, 16)
    mixed, mlp, mix = layer(x), layer.residual, layer.mix
    layer.residual = None
    parts = mix(x).softmax(-1)
    torch.testing.assert_close(mixed, parts[..., :1] * layer(x) + parts[..., 1:] * mlp(x))


def test_a_token_that_is_dropped_passes_by():
    layer, x = layer_of(experts=4, top_k=1, capacity=0.5), torch.randn(2, 8, 16)
    zero = (layer(x) == 0).all(-1)  # 8 tokens a sequence, 4 experts, 1 token for each
    assert [int(row.sum()) >= 4 for row in zero] == [True, True]
    assert not (layer_of(experts=4, top_k=1, capacity=4.0)(x) == 0).all(-1).any()


@pytest.mark.parametrize("settings", [{"capacity": 4.0}, {"gate": "gshard", "capacity": 4.0, "loss": "gshard"}])
def test_capacity_with_a_large_factor_drops_nothing(settings):
    x = torch.randn(2, 8, 16)
    assert torch.equal(
        layer_of(experts=4, **settings).eval()(x), layer_of(experts=4, **settings | {"capacity": None}).eval()(x)
    )


class Told:
    """A record that keeps what it is told."""

    def __init__(self):
        self.losses, self.loads, self.attached = {}, {}, []

    def loss(self, layer, kind, value):
        self.losses[layer, kind] = value

    def scores(self, layer, scores):
        pass

    def tokens(self, layer, asked, dropped):
        self.loads[layer] = asked.tolist(), dropped.tolist()

    def attach(self, x, loss):
        self.attached.append(loss)
        return x


def test_a_layer_tells_its_losses_and_its_load():
    layer, x = layer_of(experts=4, top_k=2, capacity=0.5, alpha=0.25, z_loss=0.1), torch.randn(2, 8, 16)
    layer.record, layer.name = Told(), "blocks.1.mlp"
    layer(x)
    asked, dropped = layer.record.loads["blocks.1.mlp"]
    assert sum(asked) == 2 * 8 * 2
    assert all(0 <= lost <= count for count, lost in zip(asked, dropped, strict=True))
    assert sum(asked) - sum(dropped) <= 2 * 4 * 2  # 2 tokens an expert and sequence
    assert layer.record.losses.keys() == {("blocks.1.mlp", "switch"), ("blocks.1.mlp", "z")}
    assert layer.record.losses["blocks.1.mlp", "switch"].item() == pytest.approx(0.25, rel=0.5)
    layer.record = Told()
    layer.eval()(x)
    assert not layer.record.losses
