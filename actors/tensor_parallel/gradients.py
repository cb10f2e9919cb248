"""Parameters of which each member of a tensor-parallel group updates a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from raypar.actors.collective.group import Group, Groups
from raypar.actors.sharding import Cut

_ALIKE = 1e-3  # relative difference of squares
_NOISE = 1e-10  # of the largest square


class Divided:
    """What the members must agree on at the end of a step. Other parameters are replicated: the same on all of them.

    cuts     by logical name, of the parameters that are divided
    partial  over which groups the gradients of a parameter, the same part of which all their members have, are to be
             summed
    group    None: nothing is divided
    watched  whether replicated gradients are compared: a user's plan may have forgotten something
    """

    def __init__(
        self, cuts: Mapping[str, Cut], partial: Mapping[str, Groups], group: Group | None, *, watched: bool
    ) -> None:
        self._cuts, self._group, self._partial, self._watched = cuts, group, partial, watched
        self._counted = {name for name in cuts if first_of(partial.get(name, ()))}

    def complete(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum partial gradients over the members, all that a group has to sum in one message."""
        made = {name: p.grad for name, p in parameters.items() if name in self._partial and p.grad is not None}
        for group in dict.fromkeys(group for name in made for group in self._partial[name]):
            _sum([gradient for name, gradient in made.items() if group in self._partial[name]], group)

    def norms(self, names: Sequence[str], norms: Tensor) -> Tensor:
        """The norms of logical gradients (n,) from those of what is here, on the host; the same on every member.

        Raises ValueError for a replicated parameter whose gradients are not, if they are watched.
        """
        if self._group is None:
            return norms
        divided = torch.tensor([name in self._cuts for name in names])
        counted = torch.tensor([name in self._counted for name in names])
        own = norms.double().square()
        squares = torch.where(counted | ~divided, own, 0.0)
        self._group.host.all_reduce(squares).wait()
        if self._watched:
            whole = [name for name in names if name not in self._cuts]
            _demand_alike(whole, own[~divided], squares[~divided], self._group)
        return torch.where(divided, squares.sqrt().to(norms.dtype), norms)


def _demand_alike(names: Sequence[str], own: Tensor, total: Tensor, group: Group) -> None:
    """Raise ValueError if squares of norms (n,), which all members should have alike, are not the mean of the members',
    to which ``total`` adds up. Of rounding noise they need not be: members may be machines of different kinds."""
    if not names:
        return
    mean = total / group.size
    apart = (own - mean).abs() > _ALIKE * mean + _NOISE * mean.max()
    if wrong := [name for name, differs in zip(names, apart.tolist(), strict=True) if differs]:
        raise ValueError(
            f"the gradient of {wrong[0]}, which is whole on every actor of {group.axis}, differs among them "
            f"({len(wrong)} of {len(names)} do): it is used on what is divided. After a column linear layer the "
            "model's plan needs a row, or a column_gather_output instead; what has weights between the two is shared"
        )


def first_of(groups: Groups) -> bool:
    """Whether this member is the first of all that have the same as their fellow members of these groups."""
    return all(group.rank == 0 for group in groups)


def _sum(gradients: Sequence[Tensor], group: Group) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    group.all_reduce(flat).wait()
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
