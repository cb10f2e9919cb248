"""The members of a grid as threads, and what they compute together as one function of the logical tensors."""

from __future__ import annotations

import torch

from raypar.actors.mesh.grid import grid_of
from raypar.actors.sharding import Pieces, Shard, Sharding, join_shards
from tests.support.local_groups import local_groups
from tests.support.threads import in_threads

GRIDS = ["2d:2x2", "2.5d:2x2x2", "3d:2x2x2"]


def groups_on(spelling):
    """What each member of a grid is a member of, by key."""
    grid, made = grid_of(spelling), {}
    members = [{"tp": group} for group in local_groups("tp", grid.size)]
    for rank, groups in enumerate(members):
        for axis, line in grid.lines(rank):
            made.setdefault((axis, line), local_groups(f"tp.{axis}", len(line)))
            groups[f"tp.{axis}"] = made[axis, line][line.index(rank)]
    return members


def cut_on(groups, shape, over):
    """What a member has of a tensor; ``over``: by dim the axes that divide it, one within the other, as ``z x``."""
    dims = {}
    for dim, axes in over.items():
        lines = [groups[f"tp.{axis}"] for axis in axes.split() if f"tp.{axis}" in groups]
        index, count = 0, 1
        for line in lines:
            index, count = index * line.size + line.rank, count * line.size
        dims[dim % len(shape)] = Pieces.at(index, count)
    return Shard(tuple(shape), Sharding(dims))


class OnGrid(torch.autograd.Function):
    """``work(groups, *parts)`` on every member, forwards and backwards.

    ins  how each input is divided; what several members have alike gets the sum of their gradients
    out  the output's logical shape, and how it is divided
    """

    @staticmethod
    def forward(ctx, work, spelling, ins, out, *inputs):
        members = groups_on(spelling)

        def one(groups):
            cuts = [cut_on(groups, x.shape, over) for x, over in zip(inputs, ins, strict=True)]
            parts = [cut.take(x).detach().clone() for cut, x in zip(cuts, inputs, strict=True)]
            leaves = [part.requires_grad_(part.is_floating_point()) for part in parts]
            with torch.enable_grad():
                return cuts, leaves, cut_on(groups, *out), work(groups, *leaves)

        ctx.made = in_threads(members, one)
        return join_shards([cut for *_, cut, _ in ctx.made], [output.detach() for *_, output in ctx.made]).clone()

    @staticmethod
    def backward(ctx, gradient):
        def one(made):
            _, leaves, cut, output = made
            floating = [leaf for leaf in leaves if leaf.requires_grad]
            found = iter(torch.autograd.grad(output, floating, cut.take(gradient), retain_graph=True))
            return [next(found) if leaf.requires_grad else None for leaf in leaves]

        found = in_threads(ctx.made, one)
        totals = []
        for number, (cut, leaf) in enumerate(zip(*ctx.made[0][:2], strict=True)):
            totals.append(leaf.new_zeros(cut.whole) if leaf.requires_grad else None)
            for (cuts, *_), back in zip(ctx.made, found, strict=True):
                if leaf.requires_grad:
                    cuts[number].take(totals[-1]).add_(back[number])
        return None, None, None, None, *totals
