"""Attention across the members of a context-parallel group is the plain core's: values, gradients, and what is sent."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from raypar.actors.context_parallel.cores import context_core
from raypar.actors.context_parallel.ring_attention import View
from raypar.actors.context_parallel.sequence import tokens_of
from raypar.actors.layers.attention.attention import Core
from raypar.actors.layers.positions import Alibi
from raypar.actors.specs.types import Context
from tests.support.local_groups import local_groups
from tests.support.logical import together
from tests.support.threads import in_threads

MODES = get_args(Context)


def random(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)


def inputs(kv_heads=4, length=8, heads=4, batch=2, width=3):
    shapes = [(batch, count, length, width) for count in (heads, kv_heads, kv_heads)]
    return tuple(random(seed, *shape) for seed, shape in enumerate(shapes))


def across(context, size, core, q, k, v):
    """The plain core's output (B, N, S, d), made by a group of which each member has some of the tokens."""
    order = torch.cat([portion.take(torch.arange(q.shape[2]), 0) for portion in tokens_of(context, size)])
    parts = (x[:, :, order] for x in (q, k, v))
    made = together(lambda group, *x: context_core(context, core(), group)(*x), size, (2, 2, 2), 2, *parts)
    return made[:, :, order.argsort()]


def fused():
    return Core("fused", 0.0, None)


def explicit():
    return Core("materialised", 0.0, None)


def biased(heads=4):
    return Core("fused", 0.0, Alibi(heads, 8))


def narrow():
    return Core("fused", 0.0, None, window=3)


def narrow_and_biased():
    return Core("materialised", 0.0, Alibi(4, 8), window=5)


@pytest.mark.each_pair
@pytest.mark.parametrize("core", [fused, explicit, biased, narrow, narrow_and_biased])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("context", MODES)
def test_it_is_the_plain_core(context, size, kv_heads, core):
    tensors = inputs(kv_heads)
    ours, theirs = across(context, size, core, *tensors), core()(*tensors)
    torch.testing.assert_close(ours, theirs)
    seed = random(4, *theirs.shape).detach()
    found, wanted = (torch.autograd.grad(out, tensors, seed) for out in (ours, theirs))
    torch.testing.assert_close(found, wanted)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "core", [fused, explicit, lambda: biased(2), narrow], ids=["fused", "explicit", "biased", "narrow"]
)
@pytest.mark.parametrize("context", MODES)
def test_gradients_are_those_of_finite_differences(context, core):
    small = inputs(kv_heads=1 if context != "ulysses" else 2, length=4, heads=2, batch=1, width=2)
    assert torch.autograd.gradcheck(lambda *x: across(context, 2, core, *x), small, fast_mode=True)


def strided(x):
    """The same numbers, with another last stride than 1, as rotations of heads of width 2 make them."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("context", MODES)
def test_any_width_and_stride_gives_the_softmax_of_the_scores(context, width):
    tensors = [x.detach().float().requires_grad_() for x in inputs(length=8, width=width)]
    order = torch.cat([portion.take(torch.arange(8), 0) for portion in tokens_of(context, 2)])
    parts = (x[:, :, order] for x in tensors)

    def one(group, *x):
        return strided(context_core(context, fused(), group)(*map(strided, x)))

    ours = together(one, 2, (2, 2, 2), 2, *parts)[:, :, order.argsort()]
    q, k, v = exact = [x.detach().double().requires_grad_() for x in tensors]
    later = torch.ones(8, 8, dtype=torch.bool).triu(1)
    right = torch.softmax((q @ k.mT / width**0.5).masked_fill(later, -torch.inf), -1) @ v
    torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-6)
    seed = random(4, *right.shape).detach()
    found, wanted = torch.autograd.grad(ours, tensors, seed.float()), torch.autograd.grad(right, exact, seed)
    torch.testing.assert_close([x.double() for x in found], list(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("context", MODES)
def test_large_scores_do_not_overflow(context):
    q, k, v = (x.detach() for x in inputs())
    torch.testing.assert_close(across(context, 2, fused, 100 * q, k, v), fused()(100 * q, k, v))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("context", ["ring", "rsa"])
def test_every_pair_is_seen_once_and_none_that_is_later(context, size):
    tokens, length = tokens_of(context, size), 2 * (2 if context == "ring" else 1)
    whole, at = length * size, torch.arange(length * size)
    seen, work = torch.zeros(whole, whole, dtype=torch.int64), []
    for rank, own in enumerate(tokens):
        view, count = View(tokens, rank, fused=False), 0
        for source, other in enumerate(tokens):
            for queries, keys, causal in view.blocks(source, length):
                rows, columns = own.take(at, 0)[queries], other.take(at, 0)[keys]
                block = torch.ones(len(rows), len(columns), dtype=torch.int64)
                seen[rows[:, None], columns] += block.tril() if causal else block
                count += int(block.sum())
        work.append(count)
    assert torch.equal(seen, torch.ones_like(seen).tril())
    assert len(set(work)) == 1 if context == "ring" else work == sorted(work), "zigzag: all have the same to do"


def moved(context, size, kv_heads=4):
    """What each member sends, forwards and backwards, by op: calls and bytes."""
    groups = local_groups("cp", size)

    def one(group):
        core = context_core(context, fused(), group)
        x = [torch.ones(2, heads, 8 // size, 3, requires_grad=True) for heads in (4, kv_heads, kv_heads)]
        out = core(*x)
        there = group.ledger.entries()
        out.sum().backward()
        return tuple(
            {key: (entry.calls, entry.bytes) for key, entry in table.items()}
            for table in (there, group.ledger.entries())
        )

    return in_threads(groups, one)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_what_they_send_is_the_formula(size, kv_heads):
    """Of b * s/n * (keys and values) elements a hop: n - 1 there, and back n - 1 with as many gradients beside."""
    part, hops = 2 * (8 // size) * kv_heads * 3 * 4, size - 1
    for there, both in moved("ring", size, kv_heads):
        assert there["cp", "send kv"] == (hops, hops * 2 * part)
        assert both["cp", "send kv"] == (2 * hops, 2 * hops * 2 * part)
        assert both["cp", "send gradient of kv"] == (hops, hops * 2 * part)
    for there, both in moved("all_gather", size, kv_heads):
        assert there["cp", "all_gather"] == (1, hops * 2 * part)
        assert both["cp", "all_gather"] == (2, 2 * hops * 2 * part)
        assert both["cp", "reduce_scatter"] == (1, hops * 2 * part)
    for there, both in moved("rsa", size, kv_heads):
        assert there["cp", "send kv"] == (2 * hops, 2 * hops * part)
        assert both["cp", "send kv"] == (4 * hops, 4 * hops * part)
        assert both["cp", "send gradient of kv"] == (2 * hops, 2 * hops * part)


@pytest.mark.parametrize("size", [2, 4])
def test_ulysses_sends_each_tensor_but_its_own_part_four_times(size):
    part = 2 * (8 // size) * 4 * 3 * 4
    for there, both in moved("ulysses", size):
        assert there["cp", "all_to_all"] == (4, 4 * part * (size - 1) // size)
        assert both["cp", "all_to_all"] == (8, 8 * part * (size - 1) // size)
