"""Exchanges in which the parts of several tensors meet, each tensor's at one rank of a group, and go back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from raypar.actors.collective.group import Group

Counts = Callable[[str, int], int]  # elements of a tensor's part, by the tensor's name and the part's rank


def gather_parts(
    group: Group, roots: Mapping[str, int], counts: Counts, parts: Mapping[str, Tensor], dtype: torch.dtype
) -> Callable[[], dict[str, list[Tensor]]]:
    """Start to send the parts of tensors to the root of each. All members call it, with the same order of tensors.

    Args:
        group: The members.
        roots: The rank that gets all parts of a tensor, by name. Members that neither send nor get any of it omit it.
        counts: Returns the elements of a rank's part, 0 if it sends nothing.
        parts: This member's part (elements,) of each tensor of ``roots``.
        dtype: The dtype in which parts are sent.

    Returns:
        A function that waits, and returns the parts by rank of each tensor whose root this member is.
    """
    sent, here = _by_root(roots), _by_root(roots)[group.rank]
    packed = _packed([parts[name] for root in range(group.size) for name in sent[root]], dtype, group.device)
    splits = [sum(counts(name, group.rank) for name in sent[root]) for root in range(group.size)]
    sizes = [[counts(name, rank) for name in here] for rank in range(group.size)]
    came = packed.new_empty(sum(map(sum, sizes)))
    handle = group.all_to_all(came, packed, [*map(sum, sizes)], splits)

    def finish() -> dict[str, list[Tensor]]:
        handle.wait()
        pieces = iter(came.split([size for each in sizes for size in each]))
        found: dict[str, list[Tensor]] = {name: [] for name in here}
        for _ in range(group.size):
            for name in here:
                found[name].append(next(pieces))
        return found

    return finish


def scatter_parts(
    group: Group, roots: Mapping[str, int], counts: Counts, pieces: Mapping[str, Sequence[Tensor]], dtype: torch.dtype
) -> Callable[[], dict[str, Tensor]]:
    """Start to send the parts of tensors from the root of each: the inverse of ``gather_parts``.

    Args:
        group: The members.
        roots: The rank that has a tensor, by name. Members that neither send nor get any of it omit it.
        counts: Returns the elements of a rank's part, 0 if it gets nothing.
        pieces: The parts by rank of each tensor whose root this member is, of any shape.
        dtype: The dtype in which parts are sent.

    Returns:
        A function that waits, and returns this member's part (elements,) of each tensor of ``roots``.
    """
    sent = _by_root(roots)
    here = sent[group.rank]
    packed = _packed([pieces[name][rank] for rank in range(group.size) for name in here], dtype, group.device)
    splits = [sum(pieces[name][rank].numel() for name in here) for rank in range(group.size)]
    names = [name for root in range(group.size) for name in sent[root]]
    sizes = [counts(name, group.rank) for name in names]
    came = packed.new_empty(sum(sizes))
    from_each = [sum(counts(name, group.rank) for name in sent[root]) for root in range(group.size)]
    handle = group.all_to_all(came, packed, from_each, splits)

    def finish() -> dict[str, Tensor]:
        handle.wait()
        return dict(zip(names, came.split(sizes), strict=True))

    return finish


def _by_root(roots: Mapping[str, int]) -> defaultdict[int, list[str]]:
    found = defaultdict[int, list[str]](list)
    for name, root in roots.items():
        found[root].append(name)
    return found


def _packed(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a copy of tensors, one after the other, each row by row."""
    packed = torch.empty(0, dtype=dtype).to(device).new_empty(sum(part.numel() for part in parts))
    for part, target in zip(parts, packed.split([part.numel() for part in parts]), strict=False):
        target.view(part.shape).copy_(part)
    return packed
