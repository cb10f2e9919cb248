"""Communication that autograd knows: what goes back is what the conjugate op makes of the gradient.

Every function is called by all members of the group in the same order, in forwards and in backwards alike. What is
replicated is the same on every member, and so is its gradient; what is partial counts as the sum over the members. Dims
count from 0, and the group's size divides them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raypar.actors.collective.group import Group, Handle

Move = Callable[[Tensor], Tensor]


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Replicated to members that each go on with it in their own way; their gradients are summed (Megatron's f)."""
    return _through(x, _same, partial(_all_reduced, group))


def reduce_from(x: Tensor, group: Group, *, in_place: bool = False) -> Tensor:
    """The sum of partial tensors, replicated; the gradient is each member's own (Megatron's g).

    ``in_place`` is for what nobody else needs, as the output of a product: autograd raises if somebody does.
    """
    return _in_place(x, group) if in_place else _through(x, partial(_all_reduced, group), _same)


def gather_from(x: Tensor, group: Group, dim: int) -> Tensor:
    """The members' parts one after the other along ``dim``, replicated."""
    return _through(x, partial(all_gathered, group, dim), partial(_own_part, group, dim))


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """The members' parts one after the other along ``dim``, for members that each go on with it in their own way."""
    return _through(x, partial(all_gathered, group, dim), partial(reduce_scattered, group, dim))


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """A member's part along ``dim`` of the sum of partial tensors."""
    return _through(x, partial(reduce_scattered, group, dim), partial(all_gathered, group, dim))


def all_to_all(x: Tensor, group: Group, split_dim: int, join_dim: int) -> Tensor:
    """Divided along ``split_dim`` instead of along ``join_dim``: part j goes to member j, and what comes is joined."""
    return _through(x, partial(_exchanged, group, split_dim, join_dim), partial(_exchanged, group, join_dim, split_dim))


def _in_place(x: Tensor, group: Group) -> Tensor:
    out: Tensor = _ReduceInPlace.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def _through(x: Tensor, there: Move, back: Move) -> Tensor:
    out: Tensor = _Through.apply(x, there, back)  # type: ignore[no-untyped-call]
    return out


class _Through(torch.autograd.Function):
    """One move forwards, its conjugate backwards."""

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
    """Start to sum partial tensors: in place, or of the sum a member's part along ``dim``.

    What to wait for, and where the sum is then.
    """
    if dim is None:
        return group.all_reduce(x), x
    parts = _parts(group, dim, x)
    own = x.new_empty(parts.shape[1:])
    return group.reduce_scatter(own, parts), own


def _parts(group: Group, dim: int, x: Tensor) -> Tensor:
    """What each member gets of a tensor: (members, ...). ValueError if the parts can't be equal."""
    if x.shape[dim] % group.size:
        raise ValueError(
            f"dim {dim} of {list(x.shape)} can't be divided equally over the {group.size} actors of {group.axis}: "
            f"give batches in which it is a multiple of {group.size}"
        )
    parts: Tensor = x.unflatten(dim, (group.size, -1))
    return parts.movedim(dim, 0).contiguous()


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _all_reduced(group: Group, x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total).wait()
    return total


def _own_part(group: Group, dim: int, x: Tensor) -> Tensor:
    return x.chunk(group.size, dim)[group.rank].contiguous()


def all_gathered(group: Group, dim: int, x: Tensor) -> Tensor:
    """What ``all_gather`` makes of a tensor, without autograd."""
    parts = x.new_empty((group.size, *x.shape))
    group.all_gather(parts, x.contiguous()).wait()
    return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def reduce_scattered(group: Group, dim: int, x: Tensor) -> Tensor:
    """What ``reduce_scatter`` makes of a tensor, without autograd."""
    handle, own = begin_sum(group, x, dim)
    handle.wait()
    return own


def _exchanged(group: Group, split_dim: int, join_dim: int, x: Tensor) -> Tensor:
    parts = _parts(group, split_dim, x)
    came = torch.empty_like(parts)
    group.all_to_all(came, parts).wait()
    return came.movedim(0, join_dim).flatten(join_dim, join_dim + 1).contiguous()
