"""Collectives that autograd differentiates: each applies an op in the forward and its conjugate in the backward.

All members of the group call every function in the same order, in forwards and in backwards. A replicated tensor is the
same on every member, and so is its gradient. A partial tensor stands for the sum over the members. Dims count from 0,
and their length must be divisible by the group's size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raypar.actors.autograd.apply_function import apply_function
from raypar.actors.collective.group import Group, Handle
from raypar.actors.sharding import Pieces
from raypar.actors.tensors import row_size

Move = Callable[[Tensor], Tensor]


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Return a replicated tensor that the members then use differently; the backward sums their gradients.

    Source: Megatron-LM (Shoeybi et al. 2019), section 3, operator f.
    """
    return through(x, _same, partial(all_reduced, group))


def reduce_from(x: Tensor, group: Group, *, in_place: bool = False) -> Tensor:
    """Sum partial tensors into a replicated one; the backward passes the gradient on unchanged.

    Args:
        x: This member's partial tensor.
        group: The group to sum over.
        in_place: Overwrite ``x``. Only for tensors that nothing else needs, such as the output of a matrix product;
            autograd raises otherwise.

    Source: Megatron-LM (Shoeybi et al. 2019), section 3, operator g.
    """
    return _in_place(x, group) if in_place else through(x, partial(all_reduced, group), _same)


def gather_from(x: Tensor, group: Group, dim: int) -> Tensor:
    """Concatenate the members' parts along ``dim`` into a replicated tensor; the backward keeps this member's part."""
    return through(x, partial(all_gathered, group, dim), partial(own_part, group, dim))


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """Concatenate the members' parts along ``dim`` for members that use the result differently.

    The backward reduce-scatters the gradients.
    """
    return through(x, partial(all_gathered, group, dim), partial(reduce_scattered, group, dim))


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """Sum partial tensors and keep this member's part along ``dim``; the backward all-gathers the gradient."""
    return through(x, partial(reduce_scattered, group, dim), partial(all_gathered, group, dim))


def all_to_all(x: Tensor, group: Group, split_dim: int, join_dim: int) -> Tensor:
    """Change the dim along which a tensor is sharded from ``join_dim`` to ``split_dim``.

    Part j along ``split_dim`` goes to member j; the parts that arrive are concatenated along ``join_dim``.
    """
    return through(x, partial(exchanged, group, split_dim, join_dim), partial(exchanged, group, join_dim, split_dim))


def all_to_all_rows(x: Tensor, group: Group, in_splits: Sequence[int], out_splits: Sequence[int]) -> Tensor:
    """Send rows to members and return the rows that arrive, in rank order; the backward sends gradients back.

    Args:
        x: Rows (sum of in_splits, ...), in the order of the members that they go to.
        group: The members.
        in_splits: Rows that go to each member; there may be none.
        out_splits: Rows that come from each member.
    """
    return through(
        x, partial(_sent_rows, group, in_splits, out_splits), partial(_sent_rows, group, out_splits, in_splits)
    )


def own_rows(x: Tensor, group: Group) -> Tensor:
    """Keep this member's rows of a replicated tensor, about equally many each; the backward gathers the gradients."""
    return through(x, partial(_rows_here, group), partial(_rows_of_all, group, len(x)))


def join_rows(x: Tensor, group: Group, count: int) -> Tensor:
    """Concatenate members' rows, computed from their ``own_rows``, to ``count`` rows; the backward keeps own rows."""
    return through(x, partial(_rows_of_all, group, count), partial(_rows_here, group))


def _in_place(x: Tensor, group: Group) -> Tensor:
    return apply_function(_ReduceInPlace, x, group)


def through(x: Tensor, there: Move, back: Move) -> Tensor:
    """Apply a function in the forward, and another one to the gradient in the backward."""
    return apply_function(_Through, x, there, back)


class _Through(torch.autograd.Function):
    """Apply one function in the forward and another, its conjugate, in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


class _ReduceInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(x)
        group.all_reduce(x).wait()
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def begin_sum(group: Group, x: Tensor, dim: int | None) -> tuple[Handle, Tensor]:
    """Start to sum partial tensors.

    Args:
        group: The group to sum over.
        x: This member's partial tensor; overwritten if ``dim`` is None.
        dim: Keep only this member's part of the sum along this dim; None for the whole sum, in place.

    Returns:
        The handle to wait for, and the tensor that holds the sum afterwards.
    """
    if dim is None:
        return group.all_reduce(x), x
    parts = _parts(group, dim, x)
    own = x.new_empty(parts.shape[1:])
    return group.reduce_scatter(own, parts), own


def _parts(group: Group, dim: int, x: Tensor) -> Tensor:
    """Divide a tensor along ``dim`` into one part per member.

    (members, ...). Raises ValueError if it is not divisible.
    """
    if x.shape[dim] % group.size:
        raise ValueError(
            f"dim {dim} of {list(x.shape)} can't be divided equally over the {group.size} actors of {group.axis}: "
            f"give batches in which it is a multiple of {group.size}"
        )
    parts: Tensor = x.unflatten(dim, (group.size, -1))
    return parts.movedim(dim, 0).contiguous()


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def all_reduced(group: Group, x: Tensor) -> Tensor:
    """Return the sum of the members' tensors, without autograd."""
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total).wait()
    return total


def own_part(group: Group, dim: int, x: Tensor) -> Tensor:
    """Return this member's part of a replicated tensor along ``dim``, without autograd."""
    return x.chunk(group.size, dim)[group.rank].contiguous()


def all_gathered(group: Group, dim: int, x: Tensor) -> Tensor:
    """Concatenate the members' tensors along ``dim``, without autograd."""
    parts = x.new_empty((group.size, *x.shape))
    group.all_gather(parts, x.contiguous()).wait()
    return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def joined_parts(group: Group, dim: int, whole: int, x: Tensor) -> Tensor:
    """Concatenate the members' parts of a dim of any size, about equally long each, without autograd.

    Args:
        group: The members.
        dim: The dim along which they have parts.
        whole: Its size.
        x: This member's part.
    """
    if whole % group.size == 0:
        return all_gathered(group, dim, x)
    return _rows_of_all(group, whole, x.movedim(dim, 0).contiguous()).movedim(0, dim).contiguous()


def reduce_scattered(group: Group, dim: int, x: Tensor) -> Tensor:
    """Sum the members' tensors and return this member's part along ``dim``, without autograd."""
    handle, own = begin_sum(group, x, dim)
    handle.wait()
    return own


def exchanged(group: Group, split_dim: int, join_dim: int, x: Tensor) -> Tensor:
    """Change the dim along which a tensor is sharded, as ``all_to_all`` does, without autograd."""
    parts = _parts(group, split_dim, x)
    came = torch.empty_like(parts)
    group.all_to_all(came, parts).wait()
    return came.movedim(0, join_dim).flatten(join_dim, join_dim + 1).contiguous()


def _sent_rows(group: Group, in_splits: Sequence[int], out_splits: Sequence[int], x: Tensor) -> Tensor:
    came = x.new_empty((sum(out_splits), *x.shape[1:]))
    group.all_to_all(came, x.contiguous(), out_splits, in_splits).wait()
    return came


def _rows_here(group: Group, x: Tensor) -> Tensor:
    start, stop = Pieces.at(group.rank, group.size).span(len(x))
    return x[start:stop].contiguous()


def _rows_of_all(group: Group, count: int, x: Tensor) -> Tensor:
    whole = x.new_empty((count, *x.shape[1:]))
    spans = (Pieces.at(rank, group.size).span(count) for rank in range(group.size))
    counts = [(stop - start) * row_size(x) for start, stop in spans]
    group.all_gather_parts(whole.view(-1), x.contiguous().view(-1), counts).wait()
    return whole
