"""A flat tensor in parts of several spans: it is packed and unpacked, summed and gathered, on every backend."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypar.actors.collective.errors import GroupError
from raypar.actors.collective.flat_cut import FlatCut
from raypar.actors.collective.gloo import group as gloo
from raypar.actors.collective.gpu.staged import StagedGroup
from raypar.actors.sharding import first_ranks
from tests.actors.collective.test_group import make, pairs, together
from tests.support.local_groups import local_groups
from tests.support.spans import cut_spans

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
SMALL = [130, 0, 1, 64, 700, 65]  # elements of tensors, of which some are less than a block
LARGE = [900_000, 3, 70_000, 64 * 9]  # parts of several segments of shared memory
ONE = [200_000]
BACKENDS = ("local", "gloo", "shm", "shm windows", "staged")


def cut_of(tensors, size, gap=5):
    """The cut of tensors that lie one after the other with gaps, and the elements of the flat tensor."""
    firsts = first_ranks(dict(enumerate(tensors)), size)
    spans, at = [[] for _ in range(size)], 0
    for number, count in enumerate(tensors):
        for rank, (start, stop) in enumerate(cut_spans(count, size, firsts[number])):
            spans[rank].append((at + start, at + stop))
        at += count + gap
    return FlatCut(tuple(map(tuple, spans))), at


def members(backend, size, timeout=30.0):
    if backend == "staged":
        return [StagedGroup(group, torch.device("cpu")) for group in local_groups("x", size, timeout)]
    return make(backend.split()[0], size, timeout)


def flats_of(backend, groups, count, dtype, seed=0):
    """A tensor of each member, of numbers whose sum depends on the order of additions."""
    made = []
    for rank, group in enumerate(groups):
        generator = torch.Generator().manual_seed(100 * seed + rank)
        values = torch.randn(count, generator=generator) * 10.0 ** (rank % 3)
        values = (values * 100).to(dtype) if dtype == torch.int64 else values.to(dtype)
        flat = group.empty(count, dtype) if backend == "shm windows" else torch.empty(count, dtype=dtype)
        made.append(flat.copy_(values))
    return made


def sum_of(flats):
    """The sum in rank order, of half precision in fp32."""
    dtype = flats[0].dtype
    total = flats[0].float() if dtype in (torch.bfloat16, torch.float16) else flats[0].clone()
    for flat in flats[1:]:
        total = total + flat
    return total.to(dtype)


def indices(cut, rank):
    return [index for start, stop in cut.spans[rank] for index in range(start, stop)]


# --- geometry --------------------------------------------------------------------------------------------------------


@given(tensors=st.lists(st.integers(0, 300), max_size=5), size=st.integers(1, 5), data=st.data())
def test_a_part_is_its_spans_one_after_the_other(tensors, size, data):
    cut, count = cut_of(tensors, size)
    flat = torch.arange(count)
    for rank in range(size):
        own = indices(cut, rank)
        assert cut.counts[rank] == len(own)
        start = data.draw(st.integers(0, len(own)))
        stop = data.draw(st.integers(start, len(own)) | st.just(len(own) + 7))
        assert cut.part(flat, rank, start, stop).tolist() == own[start:stop]
        assert all(view.numel() for view in cut.views(flat, rank))
        into = torch.full((count,), -1)
        cut.put(into, rank, cut.part(flat, rank, start, stop), start)
        assert [index for index, value in enumerate(into.tolist()) if value == index] == own[start:stop]
        assert (into == -1).sum() == count - len(own[start:stop])
    packed = cut.packed(flat)
    assert packed.tolist() == [index for rank in range(size) for index in indices(cut, rank)]
    into = torch.full((count,), -1)
    cut.unpack(packed, into)
    assert torch.equal(cut.packed(into), packed) and sorted(packed.tolist()) == into[into >= 0].tolist()
    assert cut.end <= count


def test_a_part_of_one_span_is_a_view():
    cut, flat = FlatCut((((0, 4), (6, 8)), ((4, 6), (8, 8)))), torch.zeros(9)
    cut.part(flat, 1).fill_(1)
    cut.part(flat, 0, 1, 3).fill_(2)
    cut.part(flat, 0).fill_(3)  # a copy
    assert flat.tolist() == [0, 2, 2, 0, 1, 1, 0, 0, 0]
    assert (cut.end, FlatCut(((), ())).end, FlatCut(((), ())).counts) == (8, 0, (0, 0))


# --- ops -------------------------------------------------------------------------------------------------------------


def check_sum(backend, groups, tensors, dtype, seed=0):
    """Into memory of its own, and into the spans themselves."""
    size = len(groups)
    cut, count = cut_of(tensors, size)
    flats = flats_of(backend, groups, count, dtype, seed)
    before, wanted = [flat.clone() for flat in flats], sum_of(flats)
    outs = [torch.full((cut.counts[rank],), 9).to(dtype) for rank in range(size)]
    together(size, lambda rank: groups[rank].reduce_scatter_cut(outs[rank], flats[rank], cut).wait())
    for rank in range(size):
        assert torch.equal(outs[rank], cut.part(wanted, rank))
        assert torch.equal(flats[rank], before[rank]), "an input changed"
    together(size, lambda rank: groups[rank].reduce_scatter_cut(None, flats[rank], cut).wait())
    for rank in range(size):
        cut.put(before[rank], rank, cut.part(wanted, rank))
        assert torch.equal(flats[rank], before[rank]), "its spans are the sum and all else is as before"


def check_gather(backend, groups, tensors, dtype, seed=0):
    """Of parts of their own, and of the spans themselves."""
    size = len(groups)
    cut, count = cut_of(tensors, size)
    flats = flats_of(backend, groups, count, dtype, seed)
    parts = [cut.part(flat, rank).clone() for rank, flat in enumerate(flats)]
    wanted = [flat.clone() for flat in flats]
    for whole in wanted:
        cut.unpack(torch.cat(parts), whole)
    together(size, lambda rank: groups[rank].all_gather_cut(flats[rank], None, cut).wait())
    assert all(map(torch.equal, flats, wanted)), "what belongs to nobody is as before"
    for rank, flat in enumerate(flats):
        for member in range(size):
            cut.put(flat, member, torch.full((cut.counts[member],), 9).to(dtype))
        assert not count or not sum(cut.counts) or not torch.equal(flat, wanted[rank])
    together(size, lambda rank: groups[rank].all_gather_cut(flats[rank], parts[rank], cut).wait())
    assert all(map(torch.equal, flats, wanted))


@pytest.mark.parametrize("size", [2, 3])
def test_gloo_exchanges_at_most_a_slice_of_the_parts_at_once(size, monkeypatch):
    monkeypatch.setattr(gloo, "_SLICE", 1 << 19)
    groups, moved = make("gloo", size), []
    cut, count = cut_of(LARGE, size)
    swap = groups[0]._swap

    def noted(give, take, tag):
        moved.append(4 * sum(tensor.numel() for tensor in give.values()))
        return swap(give, take, tag)

    groups[0]._swap = noted
    flats = flats_of("gloo", groups, count, torch.float32)
    together(size, lambda rank: groups[rank].reduce_scatter_cut(None, flats[rank], cut).wait())
    assert max(moved) <= 1 << 19
    assert sum(moved) == 4 * (sum(LARGE) - cut.counts[0])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("check", ["sum", "gather"])
def test_gloo_exchanges_large_parts_in_slices(check, size, monkeypatch):
    """Which give the same, and a slice may end within a span."""
    monkeypatch.setattr(gloo, "_SLICE", 1000)
    groups = make("gloo", size)
    for dtype in (torch.float32, torch.bfloat16):
        CHECKS[check]("gloo", groups, SMALL, dtype)
    CHECKS[check]("gloo", groups, [3000, 1], torch.float64)


CHECKS = {"sum": check_sum, "gather": check_gather}


@given(
    tensors=st.lists(st.integers(0, 500), max_size=5),
    size=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    check=st.sampled_from(sorted(CHECKS)),
    seed=st.integers(0, 99),
)
def test_any_cut(tensors, size, dtype, check, seed):
    CHECKS[check]("local", make("local", size), tensors, dtype, seed)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", CHECKS)
def test_a_cut_of_many_kinds_on_every_backend(check, backend, size):
    """Of small tensors, of large ones, without elements, and where members hold nothing; sums are in rank order."""
    groups = members(backend, size)
    for dtype in DTYPES:
        CHECKS[check](backend, groups, SMALL, dtype)
    CHECKS[check](backend, groups, LARGE, torch.float32)
    CHECKS[check](backend, groups, ONE, torch.bfloat16)
    for tensors in ([], [0], [1], [64, 1]):
        CHECKS[check](backend, groups, tensors, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_may_be_under_way_and_are_waited_for_in_any_order(backend, monkeypatch):
    monkeypatch.setattr(gloo, "_SLICE", 1 << 19)
    groups = members(backend, 2)
    cut, count = cut_of(SMALL, 2)
    large, many = cut_of(LARGE, 2)
    flats = [flats_of(backend, groups, count, torch.float32, seed) for seed in range(6)]
    larges = [flats_of(backend, groups, many, torch.float32, seed) for seed in range(2)]
    wanted, largest = [sum_of(pair) for pair in flats], [sum_of(pair) for pair in larges]

    def work(rank):
        handles = [groups[rank].reduce_scatter_cut(None, pair[rank], large) for pair in larges]
        handles += [groups[rank].reduce_scatter_cut(None, pair[rank], cut) for pair in flats]
        for handle in reversed(handles) if rank else handles:
            handle.wait()
        handles = [groups[rank].all_gather_cut(pair[rank], None, large) for pair in larges]
        handles += [groups[rank].all_gather_cut(pair[rank], None, cut) for pair in flats]
        for handle in handles if rank else reversed(handles):
            handle.wait()
            handle.wait()

    together(2, work)
    for pair, total in zip(flats, wanted, strict=True):
        assert all(torch.equal(cut.packed(flat), cut.packed(total)) for flat in pair)
    for pair, total in zip(larges, largest, strict=True):
        assert all(torch.equal(large.packed(flat), large.packed(total)) for flat in pair)


@pytest.mark.parametrize("backend", ["local", "gloo", "shm"])
@pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])
def test_the_ledger_counts_the_bytes_of_a_ring(backend, tensors):
    """(N - 1)/N of the parts' bytes on average; a gather sends the own part, a sum those of the others."""
    groups = make(backend, 3)
    cut, count = cut_of(tensors, 3)

    def work(rank):
        groups[rank].reduce_scatter_cut(None, flats[rank], cut).wait()
        groups[rank].all_gather_cut(flats[rank], None, cut).wait()

    flats = flats_of(backend, groups, count, torch.float32)
    together(3, work)
    for rank, group in enumerate(groups):
        entries = {op: (entry.calls, entry.bytes) for (_, op), entry in group.ledger.entries().items()}
        assert entries == {
            "reduce_scatter": (1, 4 * (sum(tensors) - cut.counts[rank])),
            "all_gather": (1, 4 * 2 * cut.counts[rank]),
        }


CUT = FlatCut((((0, 3),), ((3, 5),)))
MISTAKES = {
    "the cut must have the spans of each member": lambda g: g.reduce_scatter_cut(None, torch.zeros(5), FlatCut(((),))),
    "a flat tensor has one dim": lambda g: g.all_gather_cut(torch.zeros(5, 1), None, CUT),
    "must have the 5 elements of the cut": lambda g: g.all_gather_cut(torch.zeros(4), None, CUT),
    "the part must have the elements of its spans": lambda g: g.all_gather_cut(torch.zeros(5), torch.zeros(2), CUT),
    "both tensors must have one dtype": lambda g: g.reduce_scatter_cut(torch.zeros(3).double(), torch.zeros(5), CUT),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_before_anything_is_sent(mistake):
    group = pairs("local")[0]
    before = group.ledger.entries()
    with pytest.raises(ValueError, match=mistake):
        MISTAKES[mistake](group)
    assert group.ledger.entries() == before


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wait_for_a_member_that_does_not_come_ends_at_its_deadline(backend, tensors, monkeypatch):
    monkeypatch.setattr(gloo, "_SLICE", 1 << 19)
    groups = members(backend, 2, timeout=0.3)
    cut, count = cut_of(tensors, 2)
    flats = flats_of(backend, groups, count, torch.float32)
    begin = time.monotonic()
    with pytest.raises(GroupError, match=r"reduce_scatter failed: nothing came within 0.3 s"):
        groups[0].reduce_scatter_cut(None, flats[0], cut).wait()
    assert time.monotonic() - begin < 1.5
    with pytest.raises(GroupError, match="closed after an earlier fault"):
        groups[0].all_gather_cut(flats[0], None, cut)


@pytest.mark.parametrize(("waiting", "who"), [([0], 0), ([0, 1], 2)], ids=["its own", "its peers'"])
@pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_abort_ends_the_waits_here_and_those_for_this_member(backend, tensors, waiting, who, monkeypatch):
    monkeypatch.setattr(gloo, "_SLICE", 1 << 19)
    groups = members(backend, 3, timeout=30.0)
    cut, count = cut_of(tensors, 3)
    flats = flats_of(backend, groups, count, torch.float32)
    ended = []

    def blocked(rank):
        handle = groups[rank].all_gather_cut(flats[rank], None, cut)
        with pytest.raises(GroupError, match=r"aborted|closed"):
            handle.wait()
        ended.append(time.monotonic())

    threads = [threading.Thread(target=blocked, args=[rank]) for rank in waiting]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    begin = time.monotonic()
    groups[who].abort()
    for thread in threads:
        thread.join(5)
    assert len(ended) == len(waiting) and max(ended) - begin < 1.0
