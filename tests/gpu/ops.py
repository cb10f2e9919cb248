"""Every op of a group on small whole numbers, against what it must give; for any backend and device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from raypar.actors.collective.flat_cut import FlatCut


def together(size, work):
    """``work(rank)`` in a thread for each rank; the results by rank."""
    with ThreadPoolExecutor(size) as pool:
        return [future.result(60) for future in [pool.submit(work, rank) for rank in range(size)]]


def values(rank, count, dtype, device):
    """Numbers of one rank (count,): their sums and products over a few ranks are exact in bf16."""
    return ((torch.arange(count) + rank) % 3).to(dtype).to(device)


def strided(tensor):
    """The same numbers with other strides."""
    return torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0]


def check_every_op(group, dtype, device, layout=lambda tensor: tensor, count=4):
    """Take each op of one member to its end; all members have to call this."""
    size, rank, root = group.size, group.rank, group.size - 1

    def mine(n=count, of=rank):
        return layout(values(of, n, dtype, device))

    def empty(n):
        return layout(torch.full((n,), 9).to(dtype).to(device))

    def expect(found, wanted, what):
        assert torch.equal(found.cpu().reshape(-1), wanted.cpu().reshape(-1)), (what, rank, found, wanted)

    rows = torch.stack([values(r, count, dtype, device) for r in range(size)])
    wide = torch.stack([values(r, size * count, dtype, device) for r in range(size)])
    reductions = {"sum": rows.sum(0), "product": rows.prod(0), "min": rows.amin(0), "max": rows.amax(0)}
    for op, wanted in reductions.items():
        group.all_reduce(tensor := mine(), op).wait()
        expect(tensor, wanted.to(dtype), f"all_reduce {op}")
    group.reduce(tensor := mine(), root).wait()
    expect(tensor, reductions["sum"].to(dtype) if rank == root else rows[rank], "reduce")
    group.all_gather(out := empty(size * count), mine()).wait()
    expect(out, rows, "all_gather")
    group.reduce_scatter(out := empty(count), mine(size * count)).wait()
    expect(out, wide.sum(0).to(dtype).view(size, -1)[rank], "reduce_scatter")
    group.broadcast(tensor := mine(), root).wait()
    expect(tensor, rows[root], "broadcast")
    group.gather(out := empty(size * count) if rank == root else None, mine(), root).wait()
    if out is not None:
        expect(out, rows, "gather")
    group.scatter(out := empty(count), mine(size * count) if rank == root else None, root).wait()
    expect(out, wide[root].view(size, -1)[rank], "scatter")
    group.all_to_all(out := empty(size * count), mine(size * count)).wait()
    expect(out, wide.view(size, size, -1)[:, rank], "all_to_all")
    check_uneven(group, dtype, device)
    check_cuts(group, dtype, device)
    group.barrier().wait()
    if size > 1:
        sent = group.send(mine(), (rank + 1) % size)
        group.recv(out := empty(count), (rank - 1) % size).wait()
        sent.wait()
        expect(out, rows[(rank - 1) % size], "send and recv")


def check_uneven(group, dtype, device):
    """Rank r sends r + s rows to rank s; rank 0 sends itself nothing."""
    size, rank = group.size, group.rank
    ins, outs = [rank + s for s in range(size)], [s + rank for s in range(size)]
    tensor = torch.full((sum(ins), 2), rank).to(dtype).to(device)
    out = torch.full((sum(outs), 2), 9).to(dtype).to(device)
    group.all_to_all(out, tensor, outs, ins).wait()
    assert out[:, 0].tolist() == [s for s in range(size) for _ in range(s + rank)]


def check_cuts(group, dtype, device):
    """Rank r has 2 r elements of one tensor and 1 of another; 3 elements belong to nobody."""
    size, rank = group.size, group.rank
    second = size * (size - 1) + 3
    cut = FlatCut(tuple(((r * (r - 1), r * (r + 1)), (second + r, second + r + 1)) for r in range(size)))
    wholes = [values(r, second + size, dtype, device) for r in range(size)]
    total = torch.stack([whole.cpu() for whole in wholes]).sum(0).to(dtype)
    out = torch.full((cut.counts[rank],), 9).to(dtype).to(device)
    flat = wholes[rank].clone()
    group.reduce_scatter_cut(out, flat, cut).wait()
    group.reduce_scatter_cut(None, flat, cut).wait()
    assert torch.equal(out.cpu(), cut.part(total, rank)), ("reduce_scatter_cut", rank)
    wanted = wholes[rank].cpu().clone()
    cut.put(wanted, rank, cut.part(total, rank))
    assert torch.equal(flat.cpu(), wanted), ("reduce_scatter_cut in place", rank)
    cut.unpack(cut.packed(total), wanted)
    group.all_gather_cut(flat, None, cut).wait()
    assert torch.equal(flat.cpu(), wanted), ("all_gather_cut in place", rank)
    group.all_gather_cut(other := wholes[rank].clone(), out, cut).wait()
    assert torch.equal(other.cpu(), wanted), ("all_gather_cut", rank)


def check_nothing(group, device):
    """Every op on tensors without elements."""
    none, root = torch.empty(0, 3, device=device), 0
    group.all_reduce(none).wait()
    group.reduce(none, root).wait()
    group.all_gather(none, none).wait()
    group.reduce_scatter(none, none).wait()
    group.broadcast(none, root).wait()
    group.gather(none, none, root).wait()
    group.scatter(none, none, root).wait()
    group.all_to_all(none, none).wait()
    if group.size > 1:
        sent = group.send(none, (group.rank + 1) % group.size)
        group.recv(none, (group.rank - 1) % group.size).wait()
        sent.wait()


def check_order(group, device, count=8):
    """Send several tensors to the next member, each with a tag of its own; they come in the order of their sends."""
    size, rank = group.size, group.rank
    if size < 2:
        return
    targets = [torch.full((1000,), -1.0, device=device) for _ in range(count)]
    sources = [torch.full_like(target, 100.0 * rank + number) for number, target in enumerate(targets)]
    sent = [group.send(source, (rank + 1) % size, tag=number) for number, source in enumerate(sources)]
    received = [group.recv(target, (rank - 1) % size, tag=number) for number, target in enumerate(targets)]
    for handle in (*received, *sent):
        handle.wait()
    for number, target in enumerate(targets):
        assert target.eq(100.0 * ((rank - 1) % size) + number).all(), ("order", rank, number, target[0].item())
