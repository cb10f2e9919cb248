"""Gates against direct transcriptions of their papers: loops over tokens and experts, in plain Python numbers."""

import math
from itertools import product

import pytest
import torch

from raypar.actors.expert_parallel.gates import (
    gshard_top_2,
    in_best_groups,
    learned_noise,
    sigmoid_top_k,
    softmax_top_k,
    top_k_softmax,
    updated_bias,
)
from raypar.actors.expert_parallel.router import Router
from raypar.actors.sharding import Pieces, Sharding
from raypar.actors.specs.moe import MoE


def softmax(row):
    powers = [math.exp(x) for x in row]
    return [power / sum(powers) for power in powers]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def best(row, k):
    return sorted(range(len(row)), key=lambda i: -row[i])[:k]


def dense(choice, num_experts):
    """G(x) of every token as the papers write it: zero for experts that were not chosen."""
    skipped = torch.zeros_like(choice.chosen, dtype=torch.bool) if choice.skipped is None else choice.skipped
    gates = choice.gates.masked_fill(skipped, 0.0)
    return torch.zeros(len(gates), num_experts).scatter(1, choice.chosen, gates)


def notes(row, k):  # G(x) = TopK(softmax(x W + noise))
    probs = softmax(row)
    return [p if i in best(probs, k) else 0.0 for i, p in enumerate(probs)]


def shazeer(row, k):  # G(x) = Softmax(KeepTopK(H(x), k)), equations 3 and 5
    return softmax([x if i in best(row, k) else -math.inf for i, x in enumerate(row)])


def switch(row, k):  # equation 1, and the gate value p_i(x) of the best expert
    probs = softmax(row)
    return [p if p == max(probs) else 0.0 for p in probs]


def mixtral(row, k):  # Softmax(TopK(x W))
    return shazeer(row, k)


def deepseek(row, k, bias):  # DeepSeek-V3, equations 13 to 16
    s = [sigmoid(x) for x in row]
    chosen = best([x + b for x, b in zip(s, bias, strict=True)], k)
    raw = [x if i in chosen else 0.0 for i, x in enumerate(s)]
    return [g / sum(raw) for g in raw]


@pytest.mark.parametrize(
    ("ours", "paper", "k"),
    [
        (lambda x, k: softmax_top_k(x, k, normalise=False), notes, 2),
        (lambda x, k: softmax_top_k(x, k, normalise=False), notes, 5),
        (lambda x, k: softmax_top_k(x, k, normalise=True), mixtral, 3),
        (lambda x, k: softmax_top_k(x, k, normalise=False), switch, 1),
        (top_k_softmax, shazeer, 2),
        (top_k_softmax, shazeer, 1),
        (lambda x, k: sigmoid_top_k(x, k, normalise=True), lambda row, k: deepseek(row, k, [0] * 5), 2),
    ],
)
def test_gates_are_those_of_the_papers(ours, paper, k):
    logits = torch.randn(30, 5, generator=torch.Generator().manual_seed(k))
    choice = ours(logits, k)
    expected = torch.tensor([paper(row, k) for row in logits.tolist()])
    torch.testing.assert_close(dense(choice, 5), expected)
    torch.testing.assert_close(choice.probs.sum(1), torch.ones(30))
    assert (choice.gates.diff(dim=1) <= 1e-7).all()  # the best comes first


def test_the_bias_of_deepseek_chooses_and_does_not_weigh():
    logits, bias = torch.randn(40, 6), torch.tensor([0.4, -0.3, 0.0, 0.2, -0.5, 0.1])
    choice = sigmoid_top_k(logits, 2, normalise=True, bias_E=bias)
    expected = torch.tensor([deepseek(row, 2, bias.tolist()) for row in logits.tolist()])
    torch.testing.assert_close(dense(choice, 6), expected)
    assert not torch.equal(choice.chosen, sigmoid_top_k(logits, 2, normalise=True).chosen)


def test_the_second_expert_of_gshard_is_used_in_proportion_to_its_gate():
    logits, uniform = torch.randn(50, 4), torch.rand(50)
    choice = gshard_top_2(logits, uniform)
    for row, rnd, gates in zip(logits.tolist(), uniform.tolist(), dense(choice, 4).tolist(), strict=True):
        probs = softmax(row)
        e1, e2 = best(probs, 2)
        g1, g2 = probs[e1] / (probs[e1] + probs[e2]), probs[e2] / (probs[e1] + probs[e2])
        expected = [0.0] * 4
        expected[e1] = g1
        if 2 * g2 > rnd:  # algorithm 1
            expected[e2] = g2
        assert gates == pytest.approx(expected)
    many = gshard_top_2(torch.tensor([[0.0, -1.0]]).expand(20_000, 2), torch.rand(20_000))
    assert float(many.skipped[:, 1].double().mean()) == pytest.approx(1 - 2 * softmax([0.0, -1.0])[1], abs=0.02)
    assert gshard_top_2(logits, None).skipped is None


def test_a_token_chooses_within_its_best_groups():
    scores = torch.rand(30, 12)
    found = in_best_groups(scores, groups=4, kept=2, counted=2)
    for row, kept in zip(scores.tolist(), found.tolist(), strict=True):
        sums = [sum(sorted(row[3 * g : 3 * g + 3])[-2:]) for g in range(4)]
        assert [i for i, x in enumerate(kept) if x > -math.inf] == [i for i in range(12) if i // 3 in best(sums, 2)]
    choice = sigmoid_top_k(scores.logit(), 4, normalise=True, groups=4, kept=2)
    assert all(len({e // 3 for e in row}) <= 2 for row in choice.chosen.tolist())


def test_a_group_may_be_one_expert():
    found = in_best_groups(torch.tensor([[0.1, 0.4, 0.2, 0.3]]), groups=4, kept=2, counted=1)
    assert found[0].isinf().tolist() == [True, False, True, False]


def test_the_noise_of_shazeer_is_scaled_by_a_softplus():
    normal, widths = torch.randn(7, 3), torch.randn(7, 3)
    found = learned_noise(normal, widths)
    for i, j in product(range(7), range(3)):
        assert float(found[i, j]) == pytest.approx(float(normal[i, j]) * math.log(1 + math.exp(widths[i, j])), rel=1e-5)


def test_the_expert_bias_moves_towards_an_even_load():
    bias = updated_bias(torch.tensor([0.0, 0.5, 0.0]), torch.tensor([9, 1, 5]), 0.25)
    assert bias.tolist() == [-0.25, 0.75, 0.0]


NOISY = [
    MoE(experts=4, top_k=2, noise=1.0),
    MoE(experts=4, top_k=2, gate="shazeer"),
    MoE(experts=4, top_k=1, gate="switch", noise=0.5),
    MoE(experts=4, top_k=2, gate="gshard"),
]


@pytest.mark.parametrize("moe", NOISY, ids=lambda moe: moe.gate)
def test_noise_is_of_training_only_and_the_same_in_every_layout(moe):
    router, x = Router(moe, 8, 4), torch.randn(2, 6, 8)
    router.eval()
    quiet = router(x)
    assert quiet.skipped is None
    assert torch.equal(quiet.gates, router(x).gates)
    router.train()
    torch.manual_seed(3)
    noisy = router(x)
    told = [noisy.gates, noisy.chosen.float(), *([] if noisy.skipped is None else [noisy.skipped.float()])]
    assert noisy.skipped is not None or not torch.equal(noisy.gates, quiet.gates)
    for part in range(3):  # a third of each sequence
        tokens = Sharding({1: Pieces.at(part, 3)})
        router.noise.sharding = tokens
        torch.manual_seed(3)
        own = router(tokens.take(x))
        for whole, piece in zip(told, [own.gates, own.chosen.float(), own.skipped], strict=False):
            expected = tokens.take(whole.view(2, 6, -1)).flatten(0, 1)
            torch.testing.assert_close(piece.float(), expected)


def test_the_jitter_of_switch_is_a_factor_around_1():
    """Fedus et al. 2021, appendix: the input is multiplied by numbers that are uniform in 1 - e to 1 + e."""
    router = Router(MoE(experts=2, top_k=1, gate="switch", noise=0.25), 1, 2)
    with torch.no_grad():
        router.weight.fill_(1.0)
    factors = []
    hook = router.noise.uniform
    router.noise.uniform = lambda *args: factors.append(hook(*args)) or factors[-1]
    router(torch.ones(1, 4000, 1))
    (found,) = factors
    assert 0.75 <= found.min() < 0.76 and 1.24 < found.max() <= 1.25 and abs(found.mean() - 1) < 0.01
    assert abs(found.var() - 0.5**2 / 12) < 0.002


def test_a_router_computes_in_fp32():
    router, x = Router(MoE(experts=4), 8, 4), torch.randn(10, 8)
    half = router.bfloat16()(x.bfloat16())
    assert {half.gates.dtype, half.probs.dtype, half.logits.dtype} == {torch.float32}
    expected = x.bfloat16().float() @ router.weight.float().t()
    torch.testing.assert_close(half.logits, expected)
