"""Buckets: what goes into which, and that nothing is lost on the way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raypar.actors.data_parallel.buckets import pack
from raypar.actors.data_parallel.owners import share_out


def parameters(*sizes, dtype=torch.float32):
    return {f"p{i}": nn.Parameter(torch.randn(size, dtype=dtype)) for i, size in enumerate(sizes)}


def names(buckets):
    return [list(bucket.parameters) for bucket in buckets]


def test_a_bucket_is_filled_from_the_last_parameter_and_never_over_the_limit():
    members = parameters(10, 20, 100, 30, 5)
    assert names(pack(0, members, dict.fromkeys(members, 0), limit=160)) == [["p4", "p3"], ["p2"], ["p1", "p0"]]
    assert names(pack(0, members, dict.fromkeys(members, 0), limit=10**6)) == [["p4", "p3", "p2", "p1", "p0"]]
    assert names(pack(0, members, dict.fromkeys(members, 0), limit=1)) == [["p4"], ["p3"], ["p2"], ["p1"], ["p0"]]
    assert pack(0, {}, {}, limit=1) == []


def test_a_bucket_has_one_dtype_and_one_channel():
    members = parameters(2, 2, 2) | {"half": nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))}
    channel_of = {"p0": 0, "p1": 1, "p2": 0, "half": 0}
    buckets = pack(3, members, channel_of, limit=10**6)
    assert sorted(map(sorted, names(buckets))) == [["half"], ["p0", "p2"], ["p1"]]
    for bucket in buckets:
        assert {channel_of[name] for name in bucket.parameters} == {bucket.channel}
        assert (len({p.dtype for p in bucket.parameters.values()}), bucket.stage) == (1, 3)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(1, 3), st.integers(1, 400))
def test_what_is_in_a_channel_s_buckets_does_not_depend_on_the_others(sizes, channels, limit):
    """A server knows its buckets without the parameters of other servers."""
    members = parameters(*sizes)
    channel_of = share_out({name: 4 * p.numel() for name, p in members.items()}, channels)
    together = pack(0, members, channel_of, limit)
    assert sorted(name for bucket in together for name in bucket.parameters) == sorted(members)
    for channel in range(channels):
        alone = {name: p for name, p in members.items() if channel_of[name] == channel}
        assert names(pack(0, alone, channel_of, limit)) == names(b for b in together if b.channel == channel)


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(1, 1000), max_size=20), st.integers(1, 4))
def test_no_server_has_much_more_than_another(sizes, servers):
    channel_of = share_out(sizes, servers)
    loads = [sum(size for name, size in sizes.items() if channel_of[name] == server) for server in range(servers)]
    assert channel_of.keys() == sizes.keys()
    assert max(loads) - min(loads) <= max(sizes.values(), default=0), "the one that is largest got it all in one tensor"


@pytest.mark.parametrize("like", [torch.randn(3, 4), torch.randn(3, 4).T, torch.randn(()), torch.randn(2, 3, 4, 5)])
def test_gradients_become_views_and_keep_the_strides_of_their_weight(like):
    weight, idle = nn.Parameter(like), nn.Parameter(torch.randn(2))
    if like.dim() == 4:
        weight = nn.Parameter(like.to(memory_format=torch.channels_last))
    (bucket,) = pack(0, {"w": weight, "idle": idle}, {"w": 0, "idle": 0}, limit=10**6)
    (weight * weight).sum().backward()
    gradient = weight.grad.clone()
    flat = torch.full((bucket.size,), 9.0)
    bucket.move_in("w", flat)
    assert torch.equal(weight.grad, gradient)
    bucket.fill(flat)
    assert torch.equal(weight.grad, gradient)
    assert weight.grad.stride() == weight.stride()
    assert weight.grad.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    bucket.adopt(flat.mul_(3), bucket.flags(flat).tolist())
    assert torch.equal(weight.grad, 3 * gradient)
    assert idle.grad is None, "nobody has a gradient of it"
    other = nn.Parameter(torch.zeros_like(weight))
    (copy,) = pack(0, {"w": other, "idle": nn.Parameter(torch.zeros(2))}, {"w": 0, "idle": 0}, limit=10**6)
    copy.load(bucket.weights())
    assert torch.equal(other, weight)
