"""Tokens through experts, against the dense formula: every expert computes every token, and gates weigh."""

import pytest
import torch
from torch import nn

from raypar.actors.expert_parallel.experts import run_experts
from raypar.actors.expert_parallel.gates import capacity_of, over_capacity, softmax_top_k


def experts_of(count, width=6, out=6, seed=0):
    torch.manual_seed(seed)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(width, 9), nn.GELU(), nn.Linear(9, out)) for _ in range(count)
    ).double()


def dense(x, experts, chosen, gates):
    outs = torch.stack([expert(x) for expert in experts], 1)  # (T, E, D)
    weights = x.new_zeros(len(x), len(experts) + 1).scatter_add(1, chosen + 1, gates)[:, 1:]  # -1 falls into column 0
    return torch.einsum("te,ted->td", weights, outs)


def all_gradients(out, x, gates, experts):
    weights = torch.linspace(0.5, 2, out.numel(), dtype=out.dtype).view_as(out)
    return torch.autograd.grad((out * weights).sum(), [x, gates, *experts.parameters()], allow_unused=True)


def random_choice(tokens, num_experts, k, seed=0):
    g = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, num_experts, generator=g).topk(k).indices
    return chosen, torch.rand(tokens, k, generator=g, dtype=torch.double).requires_grad_()


CASES = {
    "top 2": lambda: random_choice(13, 4, 2),
    "top 1": lambda: random_choice(13, 4, 1),
    "all experts": lambda: random_choice(5, 4, 4),
    "all tokens to one": lambda: (torch.full((13, 1), 2), random_choice(13, 4, 1)[1]),
    "one token": lambda: random_choice(1, 4, 2),
    "some dropped": lambda: (
        random_choice(13, 4, 2)[0].masked_fill(torch.rand(13, 2) < 0.4, -1),
        random_choice(13, 4, 2)[1],
    ),
    "all dropped": lambda: (torch.full((13, 2), -1), random_choice(13, 4, 2)[1]),
    "no token": lambda: random_choice(0, 4, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_the_dense_formula(case):
    experts, (chosen, gates) = experts_of(4), CASES[case]()
    x = torch.randn(len(chosen), 6, dtype=torch.double, requires_grad=True)
    found, expected = run_experts(x, experts, chosen, gates), dense(x, experts, chosen, gates)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        all_gradients(found, x, gates, experts), all_gradients(expected, x, gates, experts), strict=True
    ):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs)


def test_gradients_of_gradients():
    experts, (chosen, gates) = experts_of(3), random_choice(5, 3, 2)
    x = torch.randn(5, 6, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, gates: run_experts(x, experts, chosen, gates), (x, gates))


def test_an_expert_without_tokens_gets_zeros_as_gradients():
    experts = experts_of(4)
    x, gates = torch.randn(6, 6, dtype=torch.double), torch.ones(6, 1, dtype=torch.double)
    run_experts(x, experts, torch.zeros(6, 1, dtype=torch.int64), gates).sum().backward()
    assert all((p.grad == 0).all() for expert in experts[1:] for p in expert.parameters())
    assert all((p.grad != 0).any() for p in experts[0].parameters())


def test_the_same_call_gives_the_same_bits():
    experts, (chosen, gates) = experts_of(8).float(), random_choice(300, 8, 3)
    x, gates = torch.randn(300, 6, requires_grad=True), gates.detach().float().requires_grad_()
    runs = []
    for _ in range(3):
        out = run_experts(x, experts, chosen, gates)
        runs.append([out, *all_gradients(out, x, gates, experts)])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_an_expert_may_change_the_width():
    experts, (chosen, gates) = experts_of(4, out=3), random_choice(13, 4, 2)
    x = torch.randn(13, 6, dtype=torch.double)
    torch.testing.assert_close(run_experts(x, experts, chosen, gates), dense(x, experts, chosen, gates))


def test_equal_experts_with_normalised_gates_are_one_expert():
    (one,) = experts_of(1)
    x = torch.randn(20, 6, dtype=torch.double)
    choice = softmax_top_k(torch.randn(20, 5, dtype=torch.double), 3, normalise=True)
    torch.testing.assert_close(run_experts(x, nn.ModuleList([one] * 5), choice.chosen, choice.gates), one(x))


def einsums(x_GSM, experts, chosen, gates, capacity):
    """GShard's form with padding: dispatch and combine tensors (G, S, E, C), algorithm 2 of the paper."""
    G, S, _ = x_GSM.shape
    combine = x_GSM.new_zeros(G, S, len(experts), capacity)
    for g in range(G):
        c = [0] * len(experts)
        for rank in range(chosen.shape[1]):
            for s in range(S):
                e = int(chosen[g * S + s, rank])
                if c[e] < capacity:
                    combine[g, s, e, c[e]] = gates[g * S + s, rank]
                c[e] += 1
    dispatched_EGCM = torch.einsum("GSEC,GSM->EGCM", (combine > 0).to(x_GSM), x_GSM)
    outs_EGCM = torch.stack([expert(part) for expert, part in zip(experts, dispatched_EGCM, strict=True)])
    return torch.einsum("GSEC,EGCM->GSM", combine, outs_EGCM)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 4.0])
def test_dropping_is_gshards_padded_form(factor):
    experts, x = experts_of(4), torch.randn(3, 10, 6, dtype=torch.double)
    choice = softmax_top_k(torch.randn(30, 4, dtype=torch.double), 2, normalise=True)
    capacity = capacity_of(factor, 10, 2, 4)
    over = over_capacity(choice.chosen, 4, [capacity] * 3)
    found = run_experts(x.flatten(0, 1), experts, choice.chosen.masked_fill(over, -1), choice.gates).view_as(x)
    torch.testing.assert_close(found, einsums(x, experts, choice.chosen, choice.gates, capacity))
    dropless = run_experts(x.flatten(0, 1), experts, choice.chosen, choice.gates).view_as(x)
    assert torch.equal(found, dropless) == (not over.any())
    assert factor < 4 or not over.any()


def test_mistakes_are_named():
    experts, x, gates = experts_of(4), torch.randn(5, 6, dtype=torch.double), torch.ones(5, 1, dtype=torch.double)
    with pytest.raises(ValueError, match="has expert 4, and there are 4"):
        run_experts(x, experts, torch.full((5, 1), 4), gates)
    with pytest.raises(ValueError, match="has the number -2"):
        run_experts(x, experts, torch.full((5, 1), -2), gates)
    with pytest.raises(ValueError, match="flatten batch and sequence"):
        run_experts(x.view(1, 5, 6), experts, torch.zeros(5, 1, dtype=torch.int64), gates)
    with pytest.raises(ValueError, match="give one a choice"):
        run_experts(x, experts, torch.zeros(5, 2, dtype=torch.int64), gates)
