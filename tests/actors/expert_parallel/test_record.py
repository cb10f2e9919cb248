"""Auxiliary losses of layers, trained on teams: the gradients are those of the loss plus the sum of them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.expert_parallel.auxiliary_loss import AuxiliaryLoss
from raypar.actors.expert_parallel.record import RouterRecord, attach_loss
from raypar.actors.expert_parallel.router_load import RouterLoad
from tests.support.schedules import halved
from tests.support.team import Team, batch, mse

WEIGHT = 0.3


class Layer(nn.Module):
    """A layer with two auxiliary losses, one of them from inside of it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.large, self.wide = AuxiliaryLoss("large", WEIGHT), AuxiliaryLoss("wide")

    def forward(self, x):
        h = self.up(x).tanh()
        h = self.large(h, penalty(h))
        return self.wide(self.down(h), self.up.weight.var())


def penalty(h):
    return h.float().pow(2).mean()


def layers(count=4):
    return [Layer() for _ in range(count)]


class Adds(RouterRecord):
    """Adds the losses up, instead of attaching them."""

    def __init__(self):
        super().__init__(self.add)
        self.total = torch.zeros(())

    def add(self, x, loss):
        self.total = self.total + loss
        return x


def objective(modules, numbers, steps=0):
    """The loss of the step in one process, and its auxiliary losses; both are means over microbatches."""
    losses, added = [], []
    for number in numbers:
        x, target = batch(steps, *number)
        record = Adds()
        for module in modules:
            for name, part in module.named_modules():
                if isinstance(part, AuxiliaryLoss):
                    part.record, part.name = record, name
            x = module(x)
        losses.append(mse(x, target))
        added.append(record.total)
    return torch.stack(losses).mean() + torch.stack(added).mean()


@cache
def wanted(m, dp):
    """The gradients of one process, by logical name."""
    team = Team(layers, 1, m, dp=dp)
    modules = layers()
    weights = team.weights()
    for index, module in enumerate(modules):
        module.load_state_dict({name: weights[f"layers.{index}.{name}"] for name in module.state_dict()})
    objective(modules, [(m_, dp_) for m_ in range(m) for dp_ in range(dp)]).backward()
    named = nn.ModuleDict({"layers": nn.ModuleList(modules)}).named_parameters()
    return {name: parameter.grad for name, parameter in named}


def agree(team, m, dp=1, rel=2e-6):
    team.step()
    ours = team.gradients()
    for name, gradient in wanted(m, dp).items():
        assert torch.linalg.vector_norm(ours[name] - gradient) <= rel * torch.linalg.vector_norm(gradient), name


@pytest.mark.sampled
@pytest.mark.parametrize(
    "recompute",
    ["none", "full", ("full", "none", "full", "none")],
    ids=["none", "full", "some layers"],
)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_gradients_are_those_of_the_sum(name, split, recompute):
    schedule = halved(name, 2, 4) if split else name
    agree(Team(layers, 2, 4, schedule, recompute=recompute), 4)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ({"dp": 2}, {}),
        ({"pp": 2, "dp": 2}, {}),
        ({"pp": 2, "dp": 2}, {"zero": 3}),
        ({"pp": 2, "dp": 2}, {"loss_scale": rp.LossScale(use="on", init=2.0**10)}),
        ({"dp": 2}, {"data_parallel": "parameter_server", "servers": 1}),
    ],
    ids=str,
)
def test_each_microbatch_of_all_replicas_has_the_same_weight(sizes, changes):
    agree(Team(layers, **{"pp": 1} | sizes, m=3, **changes), 3, dp=2)


@pytest.mark.parametrize("recompute", ["none", "full", ("full",) * 4], ids=str)
def test_in_fp16_the_loss_is_scaled_in_fp32(recompute):
    team = Team(
        layers, 2, 2, precision=rp.Precision("fp16"), loss_scale=rp.LossScale(init=2.0**12), recompute=recompute
    )
    agree(team, 2, rel=0.02)


def test_a_loss_that_is_not_attached_is_missing_from_the_gradients(monkeypatch):
    monkeypatch.setattr(RouterRecord, "_attach", lambda record, x, loss: x)
    with pytest.raises(AssertionError):
        agree(Team(layers, 2, 4), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_passes_unchanged_and_may_be_written_to(dtype):
    record, w = RouterRecord(), torch.ones(3, requires_grad=True)
    record.weight = 2.0**17  # more than fp16 holds
    x = (2 * w).to(dtype)
    y = attach_loss(x, w.sum(), record)
    assert (y.dtype, y.data_ptr()) == (dtype, x.data_ptr())
    y += 1
    y.sum().backward()
    assert w.grad.tolist() == [2.0 + 2.0**17] * 3


def test_without_a_record_or_gradients_nothing_is_attached():
    x, loss = torch.ones(2, requires_grad=True), torch.ones((), requires_grad=True)
    assert attach_loss(x, loss, None) is x
    assert attach_loss(x, loss.detach(), RouterRecord()) is x
    with torch.no_grad():
        assert attach_loss(x, loss, RouterRecord()) is x


def test_what_is_told_are_means_over_microbatches_and_sums_of_tokens():
    record = RouterRecord()
    record.begin(1.0)
    record.loss("a", "z", torch.tensor(7.0))  # before any forward: of nothing
    for microbatch in (4, 6):
        record.open(microbatch)
        record.loss("a", "z", torch.tensor(float(microbatch)))
        record.loss("a", "balance", torch.tensor(1.0, dtype=torch.bfloat16))
        record.tokens("a", torch.tensor([3, 1]), torch.tensor([1, 0]))
        if microbatch == 6:
            record.tokens("b", torch.tensor([0, 0, 5]), torch.zeros(3, dtype=torch.int64))
        record.close()
        record.loss("a", "z", torch.tensor(100.0))  # once more, in a recomputation
    assert record.losses() == (("a", "z", 5.0), ("a", "balance", 1.0))
    assert record.loads() == (("a", (6, 2), (2, 0)), ("b", (0, 0, 5), (0, 0, 0)))
    assert record.asked("a", 2).tolist() == [6, 2]
    assert record.asked("c", 3).tolist() == [0, 0, 0]
    record.begin(1.0)
    assert (record.losses(), record.loads(), record.not_finite()) == ((), (), None)


def test_a_module_that_is_called_twice_counts_twice():
    record = RouterRecord()
    record.begin(1.0)
    for microbatch in range(2):
        record.open(microbatch)
        for _ in range(2):
            record.loss("a", "z", torch.tensor(1.0))
    assert record.losses() == (("a", "z", 2.0),)


def test_the_first_router_that_is_not_finite_is_named():
    record = RouterRecord()
    record.begin(1.0)
    for microbatch, bad in enumerate([0.0, float("nan"), float("inf")]):
        record.open(microbatch)
        record.scores("a", torch.zeros(2, 2))
        record.scores("b", torch.tensor([[1.0, bad]], dtype=torch.float16))
    assert record.not_finite() == ("b", 1)


def test_a_loss_of_several_numbers_is_refused():
    with pytest.raises(ValueError, match=r"'sparsity' must be one floating number, it is \[2\] torch.float32"):
        AuxiliaryLoss("sparsity")(torch.ones(2), torch.ones(2))


def test_own_routers_tell_their_load():
    load, record, chosen = RouterLoad(3), RouterRecord(), torch.tensor([[0, 1], [0, -1], [2, 0]])
    assert load(chosen) is chosen, "outside of a run"
    load.record, load.name = record, "layers.1.load"
    record.begin(1.0)
    record.open(0)
    over = torch.tensor([[False, False], [False, False], [False, True]])
    assert load(chosen, torch.tensor([float("nan")]), over).tolist() == [[0, 1], [0, -1], [2, -1]]
    assert record.loads() == (("layers.1.load", (3, 1, 1), (1, 0, 0)),)
    assert record.not_finite() == ("layers.1.load", 0)
    assert load(chosen) is chosen
    assert record.asked("layers.1.load", 3).tolist() == [6, 2, 2]
