"""Attention and time mixing for own models: their formulas in float64, their recurrent forms, and what is held."""

from __future__ import annotations

import math
import warnings
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention.flex_attention import flex_attention as kernel
from torch.profiler import ProfilerActivity, profile

import raypar as rp
from raypar.actors.errors import MaskError
from raypar.actors.layers.attention.chunked_attention import _Chunked
from raypar.actors.layers.attention.flex_attention import by_torch
from tests.support.layouts import verdict_of

MASKS = {"causal": rp.masks.causal, "every": rp.masks.every, "window": rp.masks.sliding_window(3)}
MASKS |= {"butterfly": rp.masks.butterfly(2), "own": lambda queries, keys: (queries + keys) % 3 == 0}
MASKS |= {"prefix": rp.masks.prefix(4), "keys alone": lambda queries, keys: keys < 5}
MASKS |= {"queries alone": lambda queries, keys: queries > 2}
IDS = torch.arange(2 * 17).view(2, 17) // torch.tensor([[3], [5]])
MASK_MODS = {
    "documents": rp.masks.documents(IDS),
    "documents, prefix": rp.masks.documents(IDS, rp.masks.prefix(7)),
    "a mask_mod": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((q_idx - kv_idx) % (b + 2) == 0),
}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_formula(q, k, v, mask):
    """Attention with all scores, 0 for a query that sees no key."""
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    if mask in MASK_MODS.values():
        sizes = len(q), 1, q.shape[2], k.shape[2]
        seen = torch.tensor([bool(mask(*at)) for at in torch.cartesian_prod(*map(torch.arange, sizes))]).view(sizes)
    else:
        seen = mask(torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None])
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def test_a_query_sees_tokens_of_its_own_document_alone():
    at = torch.arange(17)
    for sample, length in enumerate((3, 5)):
        document = [(17 * sample + token) // length for token in range(17)]
        wanted = [[document[key] == document[query] and key <= query for key in range(17)] for query in range(17)]
        found = MASK_MODS["documents"](torch.tensor(sample), torch.tensor(0), at[:, None], at[None])
        assert found.tolist() == wanted


SEEN = {  # (query, key) by the words of the papers
    "causal": lambda query, key: key <= query,
    "window": lambda query, key: query - 3 < key <= query,
    "prefix": lambda query, key: key < 4 or key <= query,
    "every": lambda query, key: True,
    "butterfly": lambda query, key: key <= query and bin((query // 2) ^ (key // 2)).count("1") < 2,
}


@pytest.mark.parametrize("mask", SEEN)
def test_a_query_sees_what_the_words_of_its_mask_say(mask):
    at = torch.arange(17)
    found = MASKS[mask](at[:, None], at[None]).expand(17, 17)
    assert found.tolist() == [[SEEN[mask](query, key) for key in range(17)] for query in range(17)]


@given(
    mask=st.sampled_from(list(MASKS)),
    length=st.integers(1, 17),
    chunk=st.integers(1, 20),
    heads=st.sampled_from([(1, 1), (4, 2)]),
)
def test_chunks_compute_what_all_scores_do(mask, length, chunk, heads):
    q, k, v = (
        drawn(2, heads[0], length, 4),
        drawn(2, heads[1], length, 4, seed=1),
        drawn(2, heads[1], length, 4, seed=2),
    )
    ours, theirs = ([part.clone().requires_grad_() for part in (q, k, v)] for _ in range(2))
    out = rp.chunked_attention(*ours, mask=MASKS[mask], chunk=chunk)
    wanted = by_formula(*theirs, MASKS[mask])
    torch.testing.assert_close(out, wanted)
    given = drawn(*out.shape, seed=3)
    found = torch.autograd.grad((out * given).sum(), ours)
    for ours_of, theirs_of in zip(found, torch.autograd.grad((wanted * given).sum(), theirs), strict=True):
        torch.testing.assert_close(ours_of, theirs_of.nan_to_num(0.0))


@pytest.mark.sampled
@pytest.mark.parametrize("mask", [*MASKS.values(), *MASK_MODS.values()], ids=[*MASKS, *MASK_MODS])
def test_flex_attention_is_its_formula(mask):
    """In float64 with gradients, and as torch's own kernel computes it from the same mask."""
    q, k, v = (drawn(2, heads, 17, 4, seed=heads).requires_grad_() for heads in (4, 2, 2))
    out, wanted = rp.flex_attention(q, k, v, mask), by_formula(q, k, v, mask)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(rp.chunked_attention(q, k, v, mask=mask, chunk=5), wanted)
    given = drawn(*out.shape, seed=3)
    for ours, theirs in zip(*(torch.autograd.grad((y * given).sum(), (q, k, v)) for y in (out, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs.nan_to_num(0.0))
    # torch 2.13 has no backward on CPUs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it would rather be compiled
        torch.testing.assert_close(by_torch(kernel, *(part.detach() for part in (q, k, v)), mask), wanted)


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        (lambda b, h, q, k: (h % 2 == 0) & (q >= k), "the mask depends on the head"),
        (lambda b, h, q, k: IDS[h, q] == IDS[b, k], "the mask depends on the head"),
        (
            lambda scores, b, h, q, k: scores,
            r"takes 5 arguments: give a function of \(queries, keys\), or of \(sample,",
        ),
    ],
    ids=["a head", "an index", "a score_mod"],
)
def test_masks_that_are_none_are_told(mask, told):
    q = drawn(1, 2, 3, 4)
    with pytest.raises(MaskError, match=told):
        rp.flex_attention(q, q, q, mask)
    with pytest.raises(MaskError, match=told):
        by_torch(kernel, q, q, q, mask)


def test_a_chunk_is_all_that_is_held(monkeypatch):
    """The largest tensor of scores has chunk x chunk pairs, and chunks that nobody sees are left out."""
    from raypar.actors.layers.attention import chunked_attention

    shapes, scores = [], chunked_attention._scores
    monkeypatch.setattr(chunked_attention, "_scores", lambda *args: shapes.append(args[2].shape) or scores(*args))
    q = drawn(1, 1, 64, 4).requires_grad_()
    rp.chunked_attention(q, q, q, chunk=8).sum().backward()
    assert set(shapes) == {(8, 8)}
    assert len(shapes) == 2 * (8 * 9 // 2)
    shapes.clear()
    rp.chunked_attention(q, q, q, mask=rp.masks.butterfly(8), chunk=8)
    assert len(shapes) == sum(1 + i.bit_count() for i in range(8))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        _Chunked.apply(q, q, q, rp.masks.causal, 8)
    assert max(kept) == q.numel()


def peak(chunk, length=256):
    """The most bytes that a forward and a backward hold at once, as torch's allocator counts them."""
    q = torch.randn(1, 4, length, 8, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        rp.chunked_attention(q, q, q, chunk=chunk).sum().backward()
    events = [one for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]
    return max(accumulate(one.nbytes() for one in sorted(events, key=lambda one: one.start_ns())))


def test_the_peak_follows_the_chunk():
    peaks = {chunk: peak(chunk) for chunk in (256, 128, 64)}
    scores, inputs = {chunk: 4 * 4 * chunk**2 for chunk in peaks}, 4 * 4 * 256 * 8
    assert all(found < 4 * scores[chunk] + 15 * inputs for chunk, found in peaks.items()), peaks
    assert peaks[256] > 2 * peaks[128] > 2.4 * peaks[64], peaks


def test_shapes_that_do_not_fit_are_told():
    q = drawn(1, 4, 3, 4)
    with pytest.raises(ValueError, match="their heads divide q's"):
        rp.chunked_attention(q, drawn(1, 3, 3, 4), drawn(1, 3, 3, 4))
    with pytest.raises(ValueError, match="chunk is 0: it must be at least 1"):
        rp.chunked_attention(q, q, q, chunk=0)
    with pytest.raises(ValueError, match="3 heads do not divide the width 8"):
        rp.LinearAttention(8, 3)
    with pytest.raises(ValueError, match="3 heads do not divide the width 8"):
        rp.RelativeAttention(8, 3, 4, 4)


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_linear_attention_is_its_formula_and_its_recurrent_form(chunk):
    torch.manual_seed(0)
    layer, x = rp.LinearAttention(8, 2, chunk).double(), drawn(2, 10, 8)
    q, k, v = (y(x).unflatten(-1, (2, 4)).transpose(1, 2) for y in (layer.q, layer.k, layer.v))
    weights = ((nn.functional.elu(q) + 1) @ (nn.functional.elu(k) + 1).mT).tril()
    wanted = layer.out((weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), wanted)
    torch.testing.assert_close(token_by_token(layer, x), wanted)


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_time_mixing_is_its_formula_and_its_recurrent_form(chunk):
    torch.manual_seed(0)
    layer, x = rp.TimeMixing(6, chunk).double(), drawn(2, 10, 6) * 3
    before = torch.cat((torch.zeros(2, 1, 6), x[:, :-1]), 1)
    mixed = [x * mix + before * (1 - mix) for mix in (layer.mix_k, layer.mix_v, layer.mix_r)]
    k, v, r = layer.key(mixed[0]), layer.value(mixed[1]), layer.receptance(mixed[2]).sigmoid()
    wanted = torch.empty_like(x)
    for t in range(10):
        weights = [(k[:, i] - (t - 1 - i) * layer.decay.exp()).exp() for i in range(t)] + [
            (k[:, t] + layer.bonus).exp()
        ]
        wanted[:, t] = r[:, t] * sum(w * v[:, i] for i, w in enumerate(weights)) / sum(weights)
    wanted = layer.out(wanted)
    torch.testing.assert_close(layer(x), wanted)
    torch.testing.assert_close(token_by_token(layer, x), wanted)
    layer(x * 1e4).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def token_by_token(layer, x):
    state, made = None, []
    for token in x.split(1, 1):
        out, state = layer.resume(token, state)
        made.append(out)
    return torch.cat(made, 1)


def test_relative_attention_is_its_formula():
    torch.manual_seed(0)
    layer, x = rp.RelativeAttention(8, 2, segment=4, memory=3).double(), drawn(1, 10, 8).requires_grad_()
    for bias in (layer.content_bias, layer.distance_bias):
        nn.init.normal_(bias)
    wanted = torch.empty(1, 10, 2, 4, dtype=torch.float64)
    rates = 10_000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    for i in range(10):
        first = max(0, i // 4 * 4 - 3)
        for head in range(2):
            part = slice(4 * head, 4 * head + 4)
            q, scores = layer.q(x)[0, i, part], []
            for j in range(first, i + 1):
                encoded = torch.stack((((i - j) * rates).sin(), ((i - j) * rates).cos()), -1).flatten()
                r, k = layer.distance(encoded)[part], layer.k(x)[0, j, part]
                content, distance = layer.content_bias[head, 0], layer.distance_bias[head, 0]
                scores.append(((q + content) @ k + (q + distance) @ r) / 2)
            wanted[0, i, head] = torch.stack(scores).softmax(0) @ layer.v(x)[0, first : i + 1, part]
    torch.testing.assert_close(layer(x), layer.out(wanted.flatten(2)))
    (gradient,) = torch.autograd.grad(layer(x)[0, 4].sum(), x)
    assert not gradient[0, :4].any(), "no gradient goes into the memory"
    assert gradient[0, 4].any()


class Masked(nn.Module):
    """Self-attention within documents, which begin where the first feature is positive."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (y(x).unflatten(-1, (-1, 4)).transpose(1, 2) for y in (self.q, self.k, self.v))
        mask = rp.masks.documents((x[..., 0] > 0).cumsum(1), rp.masks.sliding_window(3))
        return x + self.out(rp.flex_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


def layers():
    return [Masked(), Residual(rp.LinearAttention(8, 2, 2)), Residual(rp.TimeMixing(8, 2)), last()]


def last():
    return Residual(rp.RelativeAttention(8, 2, 3, 2))


def batch(step, microbatch, dp):
    x = drawn(2, 6, 8, seed=97 * step + 7 * microbatch + dp).float()
    return x, x.roll(1, 1)


PLAN = {f"layers.{i}.{inner}{name}": "column" for i, inner in ((0, ""), (1, "inner.")) for name in "qkv"}
PLAN |= {"layers.0.out": "row", "layers.1.inner.out": "row"}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": rp.Mesh(pp=2), "schedule": "1f1b", "backward": "split"},
        {"mesh": rp.Mesh(tp=2), "plan": PLAN},
        {"mesh": rp.Mesh(dp=2), "zero": 3, "recompute": "full"},
    ],
    ids=["pp", "tp", "zero 3, recomputation"],
)
def test_own_models_of_them_train_as_in_one_process(changes):
    plan = changes.pop("plan", {})
    run = rp.Run(
        model=rp.Layers(layers, nn.functional.mse_loss, plan=plan, halves=True),
        data=rp.Batches(batch),
        optim=rp.SGD(lr=0.05),
        microbatches=2,
        steps=2,
        **changes,
    )
    verdict = verdict_of(run)
    assert verdict.ok, str(verdict)
