"""Gradients of the parameters that a tensor-parallel group shards: sums over its members, and norms."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raypar.actors.collective.group import Group, Groups
from raypar.actors.sharding import Shard

_HOST = torch.device("cpu")
_ROUNDING = 1e-3  # relative difference of squares of norms that counts as rounding
_NOISE = 1e-10  # difference that counts as rounding, relative to the largest square


@dataclass(eq=False)
class ShardedGradients:
    """The gradients and norms of a tensor-parallel group at the end of a step, equal on all its members.

    Parameters that are not sharded are replicated: the same on all members.

    Attributes:
        shards: This member's part of each sharded parameter, by logical name.
        partial: By logical name, the groups over which to sum the gradient of a parameter, because all their members
            hold the same part of the parameter.
        group: The tensor-parallel group; None if nothing is sharded.
        watched: Whether to compare the gradients of replicated parameters between members, which finds mistakes in a
            user's plan.
        private: Parameters that are neither sharded nor replicated over the group: each member has different ones.
        device: The device, whose tensors groups move. Gradients may be in other memory.
    """

    shards: Mapping[str, Shard]
    partial: Mapping[str, Groups]
    group: Group | None
    watched: bool
    private: Collection[str] = ()
    device: torch.device = _HOST

    def __post_init__(self) -> None:
        self._counted = {name for name in self.shards if is_first_holder(self.partial.get(name, ()))}

    def complete(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum partial gradients over their groups, with one all_reduce per group.

        Args:
            parameters: This member's parameters by logical name.
        """
        gradients = {name: p.grad for name, p in parameters.items() if name in self.partial and p.grad is not None}
        for group in dict.fromkeys(group for name in gradients for group in self.partial[name]):
            _sum([gradient for name, gradient in gradients.items() if group in self.partial[name]], group)

    def counts(self, name: str) -> bool:
        """Return whether this member counts its part of a gradient, so that each element is counted by one member.

        Args:
            name: Logical name of a parameter that is not private.
        """
        if self.group is None:
            return True
        return name in self._counted if name in self.shards else self.group.rank == 0

    def compared(self, names: Iterable[str]) -> list[str]:
        """Return those of these parameters whose gradients the members compare: see ``demand_equal_squares``."""
        if not self.watched or self.group is None:
            return []
        return [name for name in names if name not in self.shards and name not in self.private]


def demand_equal_squares(names: Sequence[str], own: Tensor, total: Tensor, group: Group) -> None:
    """Demand that gradients that should be the same on all members are, but for rounding.

    Differences of rounding are allowed, because members may be machines of different kinds.

    Args:
        names: Logical names of the parameters.
        own: Squares (n,) of the norms of this member's gradients.
        total: Sums (n,) of the members' squares.
        group: The members.

    Raises:
        ValueError: One differs from the mean of the members.
    """
    if not names:
        return
    mean = total / group.size
    different = (own - mean).abs() > _ROUNDING * mean + _NOISE * mean.max()
    if wrong := [name for name, differs in zip(names, different.tolist(), strict=True) if differs]:
        raise ValueError(
            f"the gradient of {wrong[0]}, which is whole on every actor of {group.axis}, differs among them "
            f"({len(wrong)} of {len(names)} do): the input of its module is divided. After a column linear layer the "
            "model's plan needs a row, or a column_gather_output instead; modules with weights between them are shared"
        )


def is_first_holder(groups: Groups) -> bool:
    """Return whether this member is the first of the members of these groups, which hold the same part."""
    return all(group.rank == 0 for group in groups)


def _sum(gradients: Sequence[Tensor], group: Group) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients]).to(group.device)
    group.all_reduce(flat).wait()
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
