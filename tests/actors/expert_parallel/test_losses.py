"""Losses and capacity against direct transcriptions of their papers."""

import math

import pytest
import torch

from raypar.actors.expert_parallel.gates import capacity_of, over_capacity
from raypar.actors.expert_parallel.joint_loss import JointLoss
from raypar.actors.expert_parallel.losses import alone, gshard_loss, load_of, switch_loss, z_loss


def routed(tokens, num_experts, k, seed=0):
    probs = torch.randn(tokens, num_experts, generator=torch.Generator().manual_seed(seed)).softmax(1)
    return probs.double().requires_grad_(), probs.topk(k).indices


def test_the_loss_of_switch():
    probs, chosen = routed(20, 4, 1)
    loss = 0.0
    for i in range(4):
        f = sum(int(probs[t].argmax()) == i for t in range(20)) / 20  # equation 5
        p = sum(probs[t, i].item() for t in range(20)) / 20  # equation 6
        loss += 4 * f * p  # equation 4 without alpha
    assert switch_loss(probs, chosen).item() == pytest.approx(loss)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("num_experts", [4, 8])
def test_at_an_even_load_the_loss_of_switch_is_one(k, num_experts):
    chosen = (torch.arange(num_experts)[:, None] + torch.arange(k)) % num_experts
    probs = torch.full((num_experts, num_experts), 1 / num_experts)
    assert switch_loss(probs, chosen).item() == pytest.approx(1.0)


def test_the_loss_of_gshard():
    probs, chosen = routed(24, 5, 2)
    groups, S = 3, 8
    found = 0.0
    for g in range(groups):  # algorithm 1
        rows = probs[g * S : (g + 1) * S]
        c = [0] * 5
        for s in range(S):
            c[int(rows[s].argmax())] += 1
        m = [sum(rows[s, e].item() for s in range(S)) / S for e in range(5)]
        found += sum(c[e] / S * m[e] for e in range(5)) / 5
    assert gshard_loss(probs, chosen[:, 0], groups).item() == pytest.approx(found / groups)


def test_the_z_loss():
    logits = torch.randn(9, 4, dtype=torch.double)
    expected = sum(math.log(sum(math.exp(x) for x in row)) ** 2 for row in logits.tolist()) / 9
    assert float(z_loss(logits)) == pytest.approx(expected)


@pytest.mark.parametrize("loss", ["switch", "gshard", "z"])
def test_parts_of_the_tokens_add_up_to_the_whole(loss):
    """Of the actors of a sequence each has some tokens: the loss is the whole one, gradients are of the own tokens."""
    probs, chosen = routed(16, 4, 2)

    def computed(probs, chosen, groups, sums):
        if loss == "z":
            return z_loss(probs, sums)
        return switch_loss(probs, chosen, sums) if loss == "switch" else gshard_loss(probs, chosen[:, 0], groups, sums)

    whole = computed(probs, chosen, 2, lambda own: own)
    (expected,) = torch.autograd.grad(whole, probs)
    halves = [torch.tensor([0, 1, 2, 3, 8, 9, 10, 11]), torch.tensor([4, 5, 6, 7, 12, 13, 14, 15])]
    told = []
    for half in halves:
        computed(probs[half].detach(), chosen[half], 2, lambda own: told.append(own) or own)
    for half in halves:
        own = probs[half].detach().requires_grad_()
        part = computed(own, chosen[half], 2, lambda mine: mine + (sum(told) - mine).detach())
        assert part.item() == pytest.approx(whole.item())
        torch.testing.assert_close(torch.autograd.grad(part, own)[0], expected[half])


def test_the_loss_pushes_towards_an_even_load():
    logits = torch.zeros(64, 4) + torch.tensor([1.0, 0.0, 0.0, 0.0])
    logits.requires_grad_()
    probs = logits.softmax(1)
    (gradient,) = torch.autograd.grad(switch_loss(probs, probs.topk(1).indices), logits)
    assert (gradient[:, 0] > 0).all()
    assert (gradient[:, 1:] < 0).all()


def test_the_load_counts_choices_that_are_not_dropped():
    assert load_of(torch.tensor([[0, 2], [2, -1], [2, 1]]), 4).tolist() == [1, 1, 3, 0]
    assert load_of(torch.zeros(0, 2, dtype=torch.int64), 3).tolist() == [0, 0, 0]


def test_the_capacity_is_the_even_share_times_the_factor():
    assert capacity_of(1.0, 32, 2, 8) == 8
    assert capacity_of(1.25, 32, 1, 8) == 5
    assert capacity_of(1.1, 10, 1, 1) == 11
    assert capacity_of(1.25, 30, 1, 8) == 5  # 4.6875, rounded up


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("capacities", [(1, 1, 1), (3, 7, 2), (100, 7, 1)])
@pytest.mark.parametrize("lengths", [(11, 11, 11), (4, 11, 0)])
def test_what_is_over_the_capacity(k, capacities, lengths):
    groups, S, num_experts = 3, 11, 4
    _, chosen = routed(groups * S, num_experts, k, seed=sum(capacities))
    for g, length in enumerate(lengths):
        chosen[g * S + length : (g + 1) * S] = -1
    expected = torch.zeros(groups * S, k, dtype=torch.bool)
    for g in range(groups):  # GShard, algorithm 1
        c = [0] * num_experts
        for rank in range(k):
            for s in range(lengths[g]):
                e = int(chosen[g * S + s, rank])
                expected[g * S + s, rank] = c[e] >= capacities[g]
                c[e] += 1
    assert torch.equal(over_capacity(chosen, num_experts, capacities), expected)


def test_without_tokens_nothing_is_dropped():
    assert over_capacity(torch.zeros(0, 2, dtype=torch.int64), 4, [1]).shape == (0, 2)


@pytest.mark.parametrize(("layers", "real_tokens"), [(3, (6, 4)), (1, (6, 4)), (1, (0, 1))])
def test_the_loss_over_all_layers_is_that_of_transformers(layers, real_tokens):
    """With its mask of padding, which is here by token; each layer's gradient has the choices of all."""
    module = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    num_experts, k = 5, 2
    mask = (torch.arange(6) < torch.tensor(real_tokens)[:, None]).long()
    logits = [torch.randn(12, num_experts, requires_grad=True) for _ in range(layers)]
    theirs = module.load_balancing_loss_func(tuple(logits), num_experts, k, mask)
    expected = torch.autograd.grad(theirs, logits)
    joint, real, parts = JointLoss(), mask.flatten().bool(), []
    for number, one in enumerate(logits):
        probs = one.softmax(-1)
        chosen = probs.topk(k, -1).indices.masked_fill(~real[:, None], -1)
        parts.append(joint.of_layer(probs, chosen, 7, alone, real, is_first=number == 0, again=False))
    total = torch.stack(parts).sum()
    torch.testing.assert_close(total, theirs)
    for own, other in zip(torch.autograd.grad(total, logits), expected, strict=True):
        torch.testing.assert_close(own, other)
