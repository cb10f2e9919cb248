"""Every op of a group gives what a plain computation on all members' tensors gives, on every backend."""

from __future__ import annotations

import functools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from raypar.actors.collective.errors import GroupError
from raypar.actors.collective.gloo.group import GlooGroup, create_device
from raypar.actors.collective.group import GroupMember
from raypar.actors.collective.ledger import Ledger, LedgerEntry
from tests.support.introduced import shm_group
from tests.support.local_groups import FailingGroup, LocalHub, local_groups

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
REDUCED = {
    "sum": lambda parts: parts.sum(0),
    "product": lambda parts: parts.prod(0),
    "min": lambda parts: parts.amin(0),
    "max": lambda parts: parts.amax(0),
}
BACKENDS = ("local", "gloo", "shm")


@functools.cache
def device():
    return create_device("127.0.0.1")


def gloo_groups(axis, size, timeout=30.0, store=None, names=None):
    store = dist.HashStore() if store is None else store
    name = names or f"gloo/{axis}"

    def member(rank):
        prefix = dist.PrefixStore(name, store)
        return GlooGroup(GroupMember(name, axis, rank, size, timeout, 20.0), prefix, device())

    return together(size, member)


def shm_groups(axis, size, timeout=30.0):
    store = dist.HashStore()
    return together(size, lambda rank: shm_group(f"shm/{axis}", axis, rank, size, timeout, store=store))


def make(backend, size, timeout=30.0, axis="x"):
    return {"local": local_groups, "gloo": gloo_groups, "shm": shm_groups}[backend](axis, size, timeout)


def together(size, work):
    """``work(rank)`` in a thread for each rank; the results by rank."""
    with ThreadPoolExecutor(size) as pool:
        return [future.result(20) for future in [pool.submit(work, rank) for rank in range(size)]]


@functools.cache
def pairs(backend):
    """Two members for tests that leave them usable."""
    return make(backend, 2)


@functools.cache
def trios(backend):
    """Three of them."""
    return make(backend, 3)


# --- every op against a reference ------------------------------------------------------------------------------------


def laid_out(tensor, layout):
    """A copy of a tensor with other strides."""
    if layout == "transposed" and tensor.dim() >= 2:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and tensor.dim():
        return torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0]
    return tensor.clone()


def drawn(shape, dtype, layout, seed):
    values = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(seed))  # sums are exact in bf16
    return laid_out(values.to(dtype), layout)


def cases(op, size, shape, splits):
    """(shape of the input, shape of the output) of each rank."""
    rows = [(size * (shape[0] if shape else 1), *shape[1:])] * size
    if op in ("all_gather", "gather"):
        return [shape] * size, rows
    if op in ("reduce_scatter", "scatter"):
        return rows, [shape or (1,)] * size
    if op == "all_to_all":
        return rows, rows
    if op == "all_to_all uneven":
        ins = [(sum(splits[r]), *shape[1:]) for r in range(size)]
        return ins, [(sum(splits[s][r] for s in range(size)), *shape[1:]) for r in range(size)]
    return [shape] * size, [shape] * size


def reference(op, ins, root, reduce_op, splits):
    """What each rank must end up with (None: nothing changes)."""
    size = len(ins)
    everybody = range(size)
    if op == "all_reduce":
        return [REDUCED[reduce_op](torch.stack(ins)).to(ins[0].dtype)] * size
    if op == "reduce":
        return [REDUCED[reduce_op](torch.stack(ins)).to(ins[0].dtype) if r == root else None for r in everybody]
    if op == "all_gather":
        return [torch.cat([t.reshape(-1) for t in ins])] * size
    if op == "gather":
        return [torch.cat([t.reshape(-1) for t in ins]) if r == root else None for r in everybody]
    if op == "reduce_scatter":
        return list(REDUCED[reduce_op](torch.stack(ins)).to(ins[0].dtype).reshape(-1).chunk(size))
    if op == "scatter":
        return list(ins[root].reshape(-1).chunk(size))
    if op == "broadcast":
        return [ins[root]] * size
    if op == "ring":
        return [ins[(r - 1) % size] for r in everybody]
    if op == "all_to_all":
        return [torch.cat([ins[s].chunk(size)[r] for s in everybody]) if ins[0].numel() else ins[r] for r in everybody]
    return [torch.cat([ins[s].split(splits[s])[r] for s in everybody]) for r in everybody]


def perform(group, op, tensor, out, root, reduce_op, splits):
    """Take one op to its end; returns what holds the result."""
    rank = group.rank
    if op == "all_reduce":
        group.all_reduce(tensor, reduce_op).wait()
        return tensor
    if op == "reduce":
        group.reduce(tensor, root, reduce_op).wait()
        return tensor
    if op == "broadcast":
        group.broadcast(tensor, root).wait()
        return tensor
    if op == "reduce_scatter":
        group.reduce_scatter(out, tensor, reduce_op).wait()
    elif op == "all_gather":
        group.all_gather(out, tensor).wait()
    elif op == "gather":
        group.gather(out if rank == root else None, tensor, root).wait()
    elif op == "scatter":
        group.scatter(out, tensor if rank == root else None, root).wait()
    elif op == "all_to_all":
        group.all_to_all(out, tensor).wait()
    elif op == "all_to_all uneven":
        group.all_to_all(out, tensor, [row[rank] for row in splits], splits[rank]).wait()
    elif op == "ring":
        sent = group.send(tensor, (rank + 1) % group.size, tag=7)
        group.recv(out, (rank - 1) % group.size, tag=7).wait()
        sent.wait()
    return out


OPS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all uneven",
    "broadcast", "reduce", "gather", "scatter", "ring",
)  # fmt: skip
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 40]), min_size=0, max_size=3).map(tuple)


@given(data=st.data(), op=st.sampled_from(OPS), size=st.integers(1, 4), dtype=st.sampled_from(DTYPES), shape=SHAPES)
def test_an_op_equals_its_reference(data, op, size, dtype, shape):
    root = data.draw(st.integers(0, size - 1), "root")
    reduce_op = data.draw(st.sampled_from(sorted(REDUCED)), "reduce op")
    layouts = st.sampled_from(["plain", "transposed", "strided"])
    ways = data.draw(st.tuples(layouts, layouts), "layouts")
    row = st.lists(st.sampled_from([0, 0, 1, 3]), min_size=size, max_size=size)
    splits = data.draw(st.lists(row, min_size=size, max_size=size), "splits")
    if op == "ring" and size == 1:
        return
    if op.startswith("all_to_all") and not shape:
        shape = (1,)
    check(make("local", size), op, dtype, shape, root, reduce_op, ways, splits)


UNEVEN = [[0, 0, 0], [2, 0, 1], [0, 0, 4]]  # rank 0 sends nothing, rank 1 gets nothing


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,), (3, 1, 2)])
def test_an_op_on_an_odd_shape(op, shape):
    if op.startswith("all_to_all") and not shape:
        shape = (1,)
    check(make("local", 3), op, torch.float32, shape, 1, "sum", ("transposed", "strided"), UNEVEN)


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("shape", [(0,), (3, 1, 2)])
@pytest.mark.parametrize("op", OPS)
def test_the_other_backends_have_every_op_too(op, shape, backend):
    """On every kind of numbers, in every layout, with all roots and reductions; local groups have the other shapes."""
    layouts, groups = ("plain", "transposed", "strided"), trios(backend)
    for turn, dtype in enumerate(DTYPES):
        ways = layouts[turn % 3], layouts[(turn + 1) % 3]
        for reduce_op in REDUCED if op in ("all_reduce", "reduce", "reduce_scatter") else ["sum"]:
            check(groups, op, dtype, shape, turn % 3, reduce_op, ways, UNEVEN)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_groups_of_other_sizes_have_every_op_too(backend, size):
    groups, splits = make(backend, size), [[(rank + other) % 3 for other in range(size)] for rank in range(size)]
    for op in OPS if size > 1 else OPS[:-1]:
        for shape in ((), (40, 5)) if not op.startswith("all_to_all") else ((1,), (40, 5)):
            check(groups, op, torch.float32, shape, size - 1, "sum", ("plain", "plain"), splits)


def check(groups, op, dtype, shape, root, reduce_op, ways, splits):
    size = len(groups)
    in_shapes, out_shapes = cases(op, size, shape, splits)
    ins = [drawn(in_shapes[r], dtype, ways[0], 10 * r) for r in range(size)]
    wanted = reference(op, [t.clone() for t in ins], root, reduce_op, splits)
    before = [t.clone() for t in ins]
    outs = [laid_out(torch.full(out_shapes[r], 9).to(dtype), ways[1]) for r in range(size)]
    got = together(size, lambda r: perform(groups[r], op, ins[r], outs[r], root, reduce_op, splits))
    for rank in range(size):
        if wanted[rank] is None:  # not a root
            assert torch.equal(ins[rank], before[rank])
            assert torch.equal(outs[rank], torch.full(out_shapes[rank], 9).to(dtype))
        else:
            assert got[rank].dtype == dtype
            assert torch.equal(got[rank].reshape(-1), wanted[rank].reshape(-1)), (rank, got[rank], wanted[rank])
        if got[rank] is outs[rank]:
            assert torch.equal(ins[rank], before[rank]), "an input was clobbered"


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_is_scattered_with_sums_in_fp32(backend):
    parts = [torch.tensor([256.0, 256.0]), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0])]  # 256 + 1 is 256 in bf16
    groups, outs = make(backend, 3), [torch.zeros(2, dtype=torch.bfloat16) for _ in range(3)]

    def work(rank):
        groups[rank].reduce_scatter(outs[rank], parts[rank].repeat(3).bfloat16()).wait()

    together(3, work)
    assert [out.tolist() for out in outs] == [[258.0, 258.0]] * 3


# --- handles, tags, threads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_handles_may_be_waited_for_in_reverse_and_more_than_once(backend):
    groups = pairs(backend)
    tensors = [[torch.full((5,), float(rank + i)) for i in range(6)] for rank in range(2)]

    def work(rank):
        handles = [groups[rank].all_reduce(tensor) for tensor in tensors[rank]]
        for handle in reversed(handles):
            handle.wait()
            handle.wait()

    together(2, work)
    assert all(t.tolist() == [2.0 * i + 1] * 5 for mine in tensors for i, t in enumerate(mine))


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_threads_may_wait_for_one_handle(backend):
    groups, got = pairs(backend), torch.zeros(1)
    handle = groups[0].recv(got, 1)

    def work(thread):
        if thread == 2:
            time.sleep(0.2)
            return groups[1].send(torch.ones(1), 0).wait()
        handle.wait()
        return got.item()

    assert together(3, work) == [1.0, 1.0, None]


def test_who_waits_beside_another_thread_has_a_deadline_of_his_own():
    groups, got = shm_groups("x", 2), torch.zeros(1)
    handle = groups[0].recv(got, 1)

    def work(thread):
        time.sleep(0.2 * thread)
        begin = time.monotonic()
        with pytest.raises(GroupError, match=r"nothing came within 0\.1 s" if thread else "failed"):
            handle.wait(0.1 if thread else None)
        return time.monotonic() - begin

    assert together(2, work)[1] < 1.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_deadlines_of_half_a_millisecond_and_of_years(backend):
    groups, got = make(backend, 2), torch.zeros(1)
    begin = time.monotonic()
    with pytest.raises(GroupError, match=r"nothing came within 0\.0005 s"):
        groups[0].recv(got, 1).wait(0.0005)
    assert time.monotonic() - begin < 1.3
    groups = make(backend, 2)

    def work(rank):
        if rank == 0:
            groups[0].recv(got, 1).wait(1e8)
        else:
            time.sleep(0.1)
            groups[1].send(torch.ones(1), 0).wait(1e8)

    together(2, work)
    assert got.item() == 1.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_negative_tag_is_refused(backend):
    first, second = pairs(backend)
    with pytest.raises(ValueError, match="send: a tag is 0 or more"):
        first.send(torch.ones(1), 1, tag=-2)
    with pytest.raises(ValueError, match="recv: a tag is 0 or more"):
        second.recv(torch.ones(1), 0, tag=-2)


def test_an_error_that_no_backend_knows_is_a_fault_too():
    groups, got = shm_groups("x", 2), torch.zeros(1)
    handle = groups[0].recv(got, 1)

    def fails(seconds):
        raise KeyError("unheard of")

    handle._finish = fails
    with pytest.raises(GroupError, match="unheard of"):
        handle.wait()
    with pytest.raises(GroupError, match="closed after an earlier fault"):
        groups[0].recv(got, 1)


def test_a_wait_that_was_interrupted_can_be_taken_up_again():
    groups, got, interrupts = shm_groups("x", 2), torch.zeros(1), [KeyboardInterrupt()]
    handle = groups[0].recv(got, 1)
    finish = handle._finish

    def once(seconds):
        if interrupts:
            raise interrupts.pop()
        finish(seconds)

    handle._finish = once
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    groups[1].send(torch.ones(1), 0).wait()
    handle.wait()
    assert got.item() == 1.0


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=15)
@given(order=st.permutations(range(5)))
def test_tags_find_their_messages_in_any_order_both_ways_at_once(backend, order):
    groups, got = pairs(backend), [[torch.zeros(i + 1) for i in range(5)] for _ in range(2)]

    def work(rank):
        group = groups[rank]
        sends = [group.send(torch.full((i + 1,), 10.0 * rank + i), 1 - rank, tag=i) for i in range(5)]
        receives = [group.recv(got[rank][i], 1 - rank, tag=i) for i in order]
        for handle in (*receives, *reversed(sends)):
            handle.wait()

    together(2, work)
    for rank in range(2):
        assert all(t.tolist() == [10.0 * (1 - rank) + i] * (i + 1) for i, t in enumerate(got[rank]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_messages_of_one_tag_keep_their_order(backend):
    groups, got = pairs(backend), [torch.zeros(3) for _ in range(8)]

    def work(rank):
        if rank == 0:
            handles = [groups[0].send(torch.full((3,), float(i)), 1, tag=3) for i in range(8)]
        else:
            handles = [groups[1].recv(t, 0, tag=3) for t in got]
        for handle in handles:
            handle.wait()

    together(2, work)
    assert [t[0].item() for t in got] == list(range(8))


@pytest.mark.sampled
@pytest.mark.parametrize("backend", BACKENDS)
def test_overlapping_groups_work_at_once_from_several_threads(backend):
    """Four members in the groups {01} {23} {02} {13} {0123}; each reduces in all three of its groups at once."""
    members = {"tp": [(0, 1), (2, 3)], "dp": [(0, 2), (1, 3)], "all": [(0, 1, 2, 3)]}
    mine = {rank: {} for rank in range(4)}
    for axis, parts in members.items():
        for part in parts:
            for rank, group in zip(part, make(backend, len(part), axis=f"{axis}{part}"), strict=True):
                mine[rank][axis] = (group, part)

    def reduce(rank, axis):
        group, part = mine[rank][axis]
        for turn in range(30):
            tensor = torch.full((101,), 10.0**rank + turn)
            group.all_reduce(tensor).wait()
            assert tensor.eq(sum(10.0**r + turn for r in part)).all(), (rank, axis, turn, tensor[0])

    with ThreadPoolExecutor(12) as pool:
        for future in [pool.submit(reduce, rank, axis) for rank in range(4) for axis in members]:
            future.result(60)


# --- mistakes --------------------------------------------------------------------------------------------------------

MISTAKES = {
    "all_gather": lambda g: g.all_gather(torch.zeros(5), torch.zeros(2)),
    "reduce_scatter": lambda g: g.reduce_scatter(torch.zeros(2), torch.zeros(5)),
    "all_to_all rows": lambda g: g.all_to_all(torch.zeros(3), torch.zeros(3)),
    "all_to_all in": lambda g: g.all_to_all(torch.zeros(4), torch.zeros(4), [2, 2], [1, 2]),
    "all_to_all out": lambda g: g.all_to_all(torch.zeros(4), torch.zeros(4), [2, 1], [2, 2]),
    "all_to_all many splits": lambda g: g.all_to_all(torch.zeros(4), torch.zeros(4), [2, 2], [1, 1, 2]),
    "all_to_all few splits": lambda g: g.all_to_all(torch.zeros(4), torch.zeros(4), [4], [2, 2]),
    "all_to_all negative": lambda g: g.all_to_all(torch.zeros(4), torch.zeros(4), [2, 2], [5, -1]),
    "all_to_all row size": lambda g: g.all_to_all(torch.zeros(4, 2), torch.zeros(4, 3)),
    "all_to_all scalar": lambda g: g.all_to_all(torch.zeros(()), torch.zeros(())),
    "all_to_all dtype": lambda g: g.all_to_all(torch.zeros(4), torch.zeros(4, dtype=torch.int64)),
    "all_gather dtype": lambda g: g.all_gather(torch.zeros(4), torch.zeros(2, dtype=torch.float64)),
    "reduce_scatter dtype": lambda g: g.reduce_scatter(torch.zeros(2), torch.zeros(4, dtype=torch.float64)),
    "all_reduce avg": lambda g: g.all_reduce(torch.zeros(4), "avg"),
    "reduce_scatter avg": lambda g: g.reduce_scatter(torch.zeros(2), torch.zeros(4), "avg"),
    "reduce avg": lambda g: g.reduce(torch.zeros(4), 0, "avg"),
    "broadcast root": lambda g: g.broadcast(torch.zeros(4), 2),
    "reduce root": lambda g: g.reduce(torch.zeros(4), -1),
    "gather root": lambda g: g.gather(None, torch.zeros(4), 5),
    "gather size": lambda g: g.gather(torch.zeros(5), torch.zeros(2), g.rank),
    "gather without out": lambda g: g.gather(None, torch.zeros(2), g.rank),
    "gather dtype": lambda g: g.gather(torch.zeros(4), torch.zeros(2, dtype=torch.float64), g.rank),
    "scatter size": lambda g: g.scatter(torch.zeros(2), torch.zeros(5), g.rank),
    "scatter without tensor": lambda g: g.scatter(torch.zeros(2), None, g.rank),
    "scatter dtype": lambda g: g.scatter(torch.zeros(2), torch.zeros(4, dtype=torch.float64), g.rank),
    "send to nobody": lambda g: g.send(torch.zeros(1), 2),
    "send to itself": lambda g: g.send(torch.zeros(1), g.rank),
    "recv from nobody": lambda g: g.recv(torch.zeros(1), -1),
    "recv from itself": lambda g: g.recv(torch.zeros(1), g.rank),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_before_anything_is_sent(backend, mistake):
    groups = pairs(backend)
    before = groups[0].ledger.entries()
    with pytest.raises(ValueError, match=f"group {backend}/x: "):
        MISTAKES[mistake](groups[0])
    assert groups[0].ledger.entries() == before
    tensors = [torch.ones(2), torch.ones(2)]
    together(2, lambda rank: groups[rank].all_reduce(tensors[rank]).wait())  # the group is as good as before
    assert tensors[0].tolist() == [2.0, 2.0]


# --- deadlines and abort ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wait_ends_at_its_deadline_and_says_with_whom(backend):
    groups = make(backend, 3, timeout=0.3)
    start = time.monotonic()
    with pytest.raises(
        GroupError, match=rf"group {backend}/x: recv with rank 2 failed: nothing came within 0.3 s"
    ) as caught:
        groups[0].recv(torch.zeros(4), 2).wait()
    assert 0.25 < time.monotonic() - start < 1.3
    assert (caught.value.op, caught.value.peer) == ("recv", 2)
    with pytest.raises(GroupError, match="closed after an earlier fault"):
        groups[0].all_reduce(torch.zeros(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wait_may_have_a_deadline_of_its_own(backend):
    groups = make(backend, 2, timeout=30.0)
    start = time.monotonic()
    with pytest.raises(GroupError, match=r"all_reduce failed: nothing came within 0.2 s"):
        groups[1].all_reduce(torch.zeros(4)).wait(0.2)
    assert time.monotonic() - start < 0.2 + 1.0, "the deadline and a second: the machine may be busy"


@pytest.mark.parametrize("backend", BACKENDS)
def test_abort_frees_the_waits_here_and_those_of_the_peers_for_this_member(backend):
    groups = make(backend, 3, timeout=30.0)
    ended = {}

    def blocked(rank, op):
        group, peer = groups[rank], (rank + 1) % 3 if rank == 0 else 0
        handle = group.recv(torch.zeros(4), peer, tag=9) if op == "recv" else group.all_reduce(torch.zeros(9))
        with pytest.raises(GroupError, match="aborted" if rank == 0 else "aborted|closed at the other end"):
            handle.wait()
        ended[rank, op] = time.monotonic()

    who = [(0, "recv"), (1, "recv"), (2, "recv"), (0, "all_reduce")]
    threads = [threading.Thread(target=blocked, args=one) for one in who]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert not ended
    start = time.monotonic()
    groups[0].abort()
    groups[0].abort()
    for thread in threads:
        thread.join(5)
    assert set(ended) == set(who)
    assert max(ended.values()) - start < 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fault_closes_the_owners_other_groups_once(backend):
    group, calls = make(backend, 2, timeout=0.1)[0], []
    group.on_fault = lambda: calls.append(1)
    handles = [group.recv(torch.zeros(1), 1, tag=tag) for tag in range(2)]
    for handle in handles:
        with pytest.raises(GroupError):
            handle.wait()
    assert calls == [1]


def test_a_member_that_does_not_come_is_an_error_within_the_connect_timeout():
    start = time.monotonic()
    with pytest.raises(GroupError, match=r"group alone: connect failed: rank 1 of 2 did not come within 0.5 s"):
        GlooGroup(GroupMember("alone", "x", 0, 2, 9.0, 0.5), dist.HashStore(), device())
    assert time.monotonic() - start < 3


def test_a_failing_group_fails_at_its_nth_call():
    hub, faults = LocalHub(), []
    groups = [FailingGroup(hub, "x", rank, 2, op="all_reduce", nth=3) for rank in range(2)]
    groups[0].on_fault = lambda: faults.append(1)
    for _ in range(2):
        together(2, lambda rank: groups[rank].all_reduce(torch.ones(2)).wait())
    groups[0].send(torch.ones(1), 1)  # other ops do not count
    with pytest.raises(GroupError, match="all_reduce failed: injected fault"):
        groups[0].all_reduce(torch.ones(2))
    assert faults == [1]


# --- the ledger ------------------------------------------------------------------------------------------------------

COLLECTIVES = {*OPS, "barrier"} - {"all_to_all uneven", "ring"}
N, BYTES = 3, 4 * 12  # members; bytes of 12 float32


def moved(group):
    """One call of every op, with 12 float32 a member where the op has a size of its own."""
    t, part, root = torch.zeros(12), torch.zeros(4), 1
    at_root = group.rank == root
    group.all_reduce(torch.zeros(12 * 1024)).wait()
    group.all_gather(torch.zeros(36), t).wait()
    group.reduce_scatter(part, t).wait()
    group.all_to_all(torch.zeros(12), t).wait()
    group.broadcast(t, root).wait()
    group.reduce(t, root).wait()
    group.gather(torch.zeros(36) if at_root else None, t, root).wait()
    group.scatter(part, t if at_root else None, root).wait()
    group.barrier().wait()
    if group.rank == 0:
        group.send(t, 1).wait()
        group.send(t, 1, tag=1, count_as="send tied").wait()
    elif group.rank == 1:
        group.recv(t, 0).wait()
        group.recv(t, 0, tag=1, count_as="recv tied").wait()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_ledger_counts_textbook_bytes(backend):
    groups = make(backend, N)
    together(N, lambda rank: moved(groups[rank]))
    tables = {str(rank): groups[rank].ledger.entries() for rank in range(N)}
    for rank, table in enumerate(tables.values()):
        p2p = {0: {"send"}, 1: {"recv"}, 2: set()}[rank]
        assert {op: entry.calls for (_, op), entry in table.items() if "tied" not in op} == dict.fromkeys(
            COLLECTIVES | p2p, 1
        )
    ops = {op for table in tables.values() for _, op in table}
    everyone = {op: sum(table["x", op].bytes for table in tables.values() if ("x", op) in table) for op in ops}
    assert everyone == {
        "all_reduce": 2 * (N - 1) * BYTES * 1024,  # 2 (N-1)/N of the tensor, from each of the N
        "all_gather": N * (N - 1) * BYTES,
        "reduce_scatter": (N - 1) * BYTES,
        "all_to_all": (N - 1) * BYTES,
        "broadcast": (N - 1) * BYTES,
        "reduce": (N - 1) * BYTES,
        "gather": (N - 1) * BYTES,
        "scatter": (N - 1) * BYTES // N,
        "barrier": 0,
        "send": BYTES,
        "recv": BYTES,
        "send tied": BYTES,
        "recv tied": BYTES,
    }


def test_a_small_all_reduce_goes_from_each_to_each_and_is_counted_so():
    groups, tensors = make("gloo", N), [torch.full((12,), 10.0**rank) for rank in range(N)]
    together(N, lambda rank: groups[rank].all_reduce(tensors[rank]).wait())
    assert all(tensor.eq(111).all() for tensor in tensors)
    assert [group.ledger.entries()["x", "all_reduce"] for group in groups] == [LedgerEntry(1, (N - 1) * BYTES)] * N


def test_the_ledger_counts_the_seconds_spent_in_an_op():
    """Also of who waits for a member that comes late."""
    groups = local_groups("x", 2)

    def work(rank):
        time.sleep(0.4 * rank)
        groups[rank].barrier().wait()

    together(2, work)
    early, late = (group.ledger.entries()["x", "barrier"].seconds for group in groups)
    assert early > 0.2 > late


@pytest.mark.long
def test_a_ledger_is_read_while_others_add():
    ledger, interval = Ledger(), sys.getswitchinterval()

    def add(rank):
        for n in range(500):
            ledger.record(f"{rank}", f"{n}", 2)
            ledger.entries()

    sys.setswitchinterval(1e-6)  # nearly every call may be the last for now
    try:
        together(3, add)
    finally:
        sys.setswitchinterval(interval)
    assert ledger.entries() == {(f"{rank}", f"{n}"): LedgerEntry(1, 2) for rank in range(3) for n in range(500)}
