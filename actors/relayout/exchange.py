"""Bulk exchange: every member of a group sends tensors to others and receives theirs, in chunks of some megabytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from raypar.actors.collective.group import Group
from raypar.actors.tensors import nbytes

CHUNK = 8 << 20  # bytes of a message, unless one element has more


def exchange_tensors(
    group: Group, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]
) -> None:
    """Send tensors to other members of a group, and receive theirs. All members call it.

    In round r a member sends to the r-th one after it and receives from the r-th one before it, so that nobody waits in
    a circle, and has one chunk of each under way.

    Args:
        group: The group.
        sends: By member, the tensors to send: on the host, of any strides.
        receives: By member, where to store what it sends: tensors on the host of the same shapes and dtypes in the same
            order, of any strides.

    Raises:
        GroupError: A member failed, or is late.
    """
    for distance in range(1, group.size):
        to, by = (group.rank + distance) % group.size, (group.rank - distance) % group.size
        outgoing, incoming = list(_chunks(sends.get(to, ()))), list(_chunks(receives.get(by, ())))
        for number in range(max(len(outgoing), len(incoming))):
            flat = None
            handles = []
            if number < len(incoming):
                size = sum(map(nbytes, incoming[number]))
                flat = torch.empty(size, dtype=torch.uint8, device=group.device)
                handles.append(group.recv(flat, by, number))
            if number < len(outgoing):
                handles.append(group.send(_packed(outgoing[number]).to(group.device), to, number))
            for handle in handles:
                handle.wait()
            if flat is not None:
                group.synchronize()
                _unpack(flat.cpu(), incoming[number])


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield views that make up all tensors, in groups for one message each."""
    chunk, size = list[Tensor](), 0
    for view in (view for tensor in _aligned(tensors) for view in _views(tensor)):
        if size + nbytes(view) > CHUNK and chunk:
            yield chunk
            chunk, size = [], 0
        chunk.append(view)
        size += nbytes(view)
    if chunk:
        yield chunk


def _aligned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in an order in which each is aligned behind the others: those with the widest elements first."""
    return sorted(tensors, key=lambda tensor: -tensor.element_size())


def _views(tensor: Tensor) -> Iterator[Tensor]:
    """Yield views of at most a chunk that make up a tensor."""
    if nbytes(tensor) <= CHUNK or tensor.numel() == 1:
        yield tensor
        return
    dim = next(dim for dim, length in enumerate(tensor.shape) if length > 1)
    for half in tensor.tensor_split(2, dim):
        yield from _views(half)


def _packed(views: Sequence[Tensor]) -> Tensor:
    """Return the bytes of some tensors side by side."""
    return torch.cat([view.contiguous().reshape(-1).view(torch.uint8) for view in views])


def _unpack(flat: Tensor, views: Sequence[Tensor]) -> None:
    """Copy the bytes that ``_packed`` returned into some tensors."""
    for view, part in zip(views, flat.split([nbytes(view) for view in views]), strict=True):
        view.copy_(part.view(view.dtype).view(view.shape))
