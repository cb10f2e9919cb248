"""Shadowing: popular experts are copied to all actors for a pass, so that their tokens are not sent.

Source: He et al. 2022, "FasterMoE", section 4.1, with its cost model: the slowest actor's products, three times those
of a forward, and four exchanges of tokens; for a shadow, its weights to all actors and its gradients back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raypar.actors.collective.group import Group, wait_all

# For one CPU core and for shared memory (docs/decisions/experts.md, 2026-11-25). Only their ratio decides.
FLOPS = 40e9  # operations a second
BYTES = 2e9  # bytes a second, into or out of an actor

Weights = tuple[Tensor, ...]


class ShadowChoice(NamedTuple):
    """The shadowed experts, and the predicted seconds.

    Attributes:
        slots: Positions of the shadowed experts: ``experts of an actor * owner + expert``.
        without: Predicted seconds of the layer for a microbatch, without shadows.
        having: Predicted seconds with these shadows.
    """

    slots: tuple[int, ...]
    without: float
    having: float


@dataclass(frozen=True)
class Shadowing:
    """Chooses the experts of a layer to shadow: the n most popular ones, with n by the predicted seconds.

    Attributes:
        most: Largest number of shadowed experts.
        weights: Number of parameters of an expert; each costs two operations a row in a forward.
        row_bytes: Bytes of a token.
        weight_bytes: Bytes of an expert's parameters.
    """

    most: int
    weights: int
    row_bytes: int
    weight_bytes: int

    def choose(self, asked: Tensor) -> ShadowChoice:
        """Return the experts to shadow. All members of a group choose the same ones.

        Args:
            asked: The number of rows by sender, owner and expert of that owner, on the host.
        """
        rows = asked.sum(0).flatten().tolist()
        popular = sorted(range(len(rows)), key=lambda slot: (-rows[slot], slot))
        counts = range(min(self.most, len(popular)) + 1)
        seconds = [self.seconds(asked, popular[:count]) for count in counts]
        best = min(counts, key=lambda count: (seconds[count], count))
        return ShadowChoice(tuple(sorted(popular[:best])), seconds[0], seconds[best])

    def seconds(self, asked: Tensor, shadows: Sequence[int]) -> float:
        """Return the predicted seconds of the layer for a microbatch, forward and backward.

        Args:
            asked: As of ``choose``.
            shadows: Positions of the shadowed experts.
        """
        members, by_slot = len(asked), asked.flatten(1)
        away = by_slot.clone()
        away[:, [*shadows]] = 0
        by_owner = away.view_as(asked).sum(2)
        computed = by_owner.sum(0) + by_slot[:, [*shadows]].sum(1)
        travels = by_owner.fill_diagonal_(0)
        products = 3 * int(computed.max()) * 2 * self.weights / FLOPS
        exchanges = 4 * int(max(travels.sum(0).max(), travels.sum(1).max())) * self.row_bytes / BYTES
        return products + exchanges + 2 * len(shadows) * (members - 1) * self.weight_bytes / BYTES


def dispatch(
    rows_ND: Tensor, group: Group, ins: Sequence[int], outs: Sequence[int], visits: Sequence[tuple[int, Weights]]
) -> tuple[Tensor, list[Weights]]:
    """Send rows to their experts, and the weights of shadowed experts to all members.

    One autograd function does both, so that all members issue its collectives in one order in the backward, too.

    Args:
        rows_ND: The rows to send, sorted by receiver. If one member's rows need a gradient, those of all members must,
            so that all run this backward.
        group: The members.
        ins: Number of rows to each member.
        outs: Number of rows from each member.
        visits: The owner of each shadowed expert, and its weights; on other members, tensors of their shapes.

    Returns:
        The received rows, and the weights of each shadowed expert. The backward sums their gradients.
    """
    counts = [len(weights) for _, weights in visits]
    given = [weight for _, weights in visits for weight in weights]
    owners = [owner for owner, _ in visits]
    came, *found = _Dispatch.apply(rows_ND, group, (ins, outs), (owners, counts), *given)  # type: ignore[no-untyped-call]
    left = iter(found)
    return came, [tuple(next(left) for _ in range(count)) for count in counts]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: Tensor,
        group: Group,
        splits: tuple[Sequence[int], Sequence[int]],
        visits: tuple[Sequence[int], Sequence[int]],
        *given: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.splits = splits
        ctx.visits = visits
        ctx.width = rows_ND.shape[1]
        ins, outs = splits
        came = rows_ND.new_empty((sum(outs), ctx.width))
        handles = [group.all_to_all(came, rows_ND.contiguous(), outs, ins)]
        flats = [_flat(weights) for weights in _grouped(given, visits[1])]
        handles += [group.broadcast(flat, owner) for owner, flat in zip(visits[0], flats, strict=True)]
        wait_all(handles)
        found = [
            part for flat, like in zip(flats, _grouped(given, visits[1]), strict=True) for part in _cut(flat, like)
        ]
        return came, *found

    @staticmethod
    def backward(ctx: Any, grad_came: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        group, (ins, outs), (owners, counts) = ctx.group, ctx.splits, ctx.visits
        back = grad_came.new_empty((sum(ins), ctx.width))
        handles = [group.all_to_all(back, grad_came.contiguous(), ins, outs)]
        flats = [_flat(weights) for weights in _grouped(gradients, counts)]
        handles += [group.reduce(flat, owner) for owner, flat in zip(owners, flats, strict=True)]
        wait_all(handles)
        found: list[Tensor | None] = []
        for owner, flat, like in zip(owners, flats, _grouped(gradients, counts), strict=True):
            found += _cut(flat, like) if owner == group.rank else [None] * len(like)
        return back, None, None, None, *found


def _grouped(tensors: Sequence[Tensor], counts: Sequence[int]) -> Iterator[Weights]:
    left = iter(tensors)
    return (tuple(next(left) for _ in range(count)) for count in counts)


def _flat(tensors: Weights) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _cut(flat: Tensor, like: Weights) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape).clone() for part, tensor in zip(parts, like, strict=True)]
