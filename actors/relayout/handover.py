"""The transfer of an actor's state to another layout: the parts that it has and needs, and their exchange in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.actors.checkpoint.shards import AtHand
from raypar.actors.collective.group import Group
from raypar.actors.portions import portions
from raypar.actors.relayout.moves import Boxes, HeldTensors, Kind, TensorMove
from raypar.actors.sharding import Box, Part, Shape, Shard, common, in_box
from raypar.actors.tensors import nbytes

CHUNK = 8 << 20  # bytes of a message, unless one element has more


def exchange_tensors(
    group: Group, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]
) -> None:
    """Send tensors to other members of a group, and receive theirs. All members call it.

    In round r a member sends to the r-th one after it and receives from the r-th one before it, one chunk at a time, so
    that there is no circular wait.

    Args:
        group: The group.
        sends: By member, the tensors to send: on the host, of any strides.
        receives: By member, the tensors to receive into: on the host, of the same shapes and dtypes in the same order,
            of any strides.

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
    return portions((view for tensor in _aligned(tensors) for view in _views(tensor)), nbytes, CHUNK)


def _aligned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in an order in which all are aligned when concatenated: widest elements first."""
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
    """Return the bytes of some tensors, concatenated."""
    return torch.cat([view.contiguous().reshape(-1).view(torch.uint8) for view in views])


def _unpack(flat: Tensor, views: Sequence[Tensor]) -> None:
    """Copy the bytes that ``_packed`` returned into some tensors."""
    for view, part in zip(views, flat.split([nbytes(view) for view in views]), strict=True):
        view.copy_(part.view(view.dtype).view(view.shape))


class WantedTensor(NamedTuple):
    """A part of the state that an actor loads.

    Attributes:
        weight: The actor's name of the weight, or of another tensor.
        kept: Its optimizer state, such as ``exp_avg``; "" for the weight itself.
        tensors: Logical names; the first that exists is loaded.
        part: Returns the part to load of a logical tensor of some shape.
    """

    weight: str
    kept: str
    tensors: tuple[str, ...]
    part: Callable[[Shape], Part]


class TensorPart(NamedTuple):
    """A part of a logical tensor that an actor needs.

    Attributes:
        tensor: The logical tensor's name.
        part: The part.
    """

    tensor: str
    part: Part


def wanted_parts(wanted: Iterable[WantedTensor], shapes: Mapping[str, Shape]) -> dict[tuple[str, str], TensorPart]:
    """Return the parts of logical tensors that an actor loads, by (weight, optimizer state).

    Args:
        wanted: The tensors that the actor loads, if they exist.
        shapes: The shapes of all existing logical tensors, by name.
    """
    found = dict[tuple[str, str], TensorPart]()
    for one in wanted:
        tensor = next((name for name in one.tensors if name in shapes), None)
        if tensor is not None:
            found[one.weight, one.kept] = TensorPart(tensor, one.part(shapes[tensor]))
    return found


def boxes_of_parts(parts: Iterable[TensorPart]) -> Boxes:
    """Return the boxes of parts of tensors, each once, by the tensor's name."""
    found: dict[str, dict[Box, None]] = {}
    for part in dict.fromkeys(parts):
        found.setdefault(part.tensor, {}).update(dict.fromkeys(part.part.boxes()))
    return {tensor: tuple(boxes) for tensor, boxes in found.items()}


class Handover:
    """The state of one actor, copied to the host for the actors of another layout, and the state that it receives.

    Args:
        pieces: The actor's state: logical name, part of the logical tensor (None for all of it), and the tensor.
        at: Returns a context in which some tensors can be read.
    """

    def __init__(self, pieces: Iterable[tuple[str, Shard | None, Tensor]] = (), at: AtHand = nullcontext) -> None:
        self._pieces: dict[str, dict[Box, Tensor]] = {}
        self._kinds: dict[str, Kind] = {}
        self._wanted: dict[tuple[str, str], TensorPart] = {}
        self._received: dict[str, dict[TensorPart, Tensor]] = {}  # by logical name
        for name, shard, tensor in pieces:
            shard = shard or Shard(tuple(tensor.shape))
            known, part = self._pieces.setdefault(name, {}), shard.part
            self._kinds[name] = Kind(str(tensor.dtype).removeprefix("torch."), shard.whole)
            if not known.keys() >= set(part.boxes()):
                with at([tensor]):
                    known.update(part.pieces(tensor.detach().to("cpu", copy=True)))

    @property
    def holding(self) -> HeldTensors:
        """The parts that the actor has."""
        return HeldTensors({name: tuple(boxes) for name, boxes in self._pieces.items()}, self._kinds)

    def want(self, wanted: Iterable[WantedTensor], kinds: Mapping[str, Kind]) -> Boxes:
        """Set the tensors that the actor loads in the new layout, and return their boxes.

        Args:
            wanted: The tensors that it loads, if they exist.
            kinds: All existing logical tensors.
        """
        self._kinds = dict(kinds)
        self._wanted = wanted_parts(wanted, {name: kind.shape for name, kind in kinds.items()})
        return boxes_of_parts(self._wanted.values())

    def pass_on(self, moves: Sequence[TensorMove], group: Group | None) -> None:
        """Send the parts that other actors need, and receive those of this actor. All actors of the group call it.

        Args:
            moves: All moves from or to this actor, in the same order on all actors; actors are ranks in the group.
            group: The group of all senders and receivers; None if nothing is sent.

        Raises:
            GroupError: Another actor failed, or is late.
        """
        rank = 0 if group is None else group.rank
        for part in dict.fromkeys(self._wanted.values()):
            kind = self._kinds[part.tensor]
            empty = torch.empty(part.part.shape, dtype=getattr(torch, kind.dtype))
            self._received.setdefault(part.tensor, {})[part] = empty
        sends, receives = dict[int, list[Tensor]](), dict[int, list[Tensor]]()
        for move in moves:
            if move.is_sent and move.source == rank:
                sends.setdefault(move.destination, []).append(self._cut(move))
            elif move.is_sent:
                receives.setdefault(move.source, []).append(next(self._views(move)))
            else:
                next(self._views(move)).copy_(self._cut(move))
        if group is not None:
            exchange_tensors(group, sends, receives)
        for move in moves:
            if move.destination == rank:
                first, *others = self._views(move)
                for other in others:
                    other.copy_(first)
        self._pieces = {}

    def read(self, weight: str, kept: str) -> Tensor | None:
        """Return a received tensor by weight and optimizer state; None if there is no such tensor."""
        part = self._wanted.get((weight, kept))
        return None if part is None else self._received[part.tensor][part]

    def _cut(self, move: TensorMove) -> Tensor:
        """Return the view of the part that a move reads from this actor."""
        if (view := next(_inside(self._pieces[move.tensor].items(), move.box), None)) is not None:
            return view
        raise LookupError(f"{move.tensor!r} {list(move.box)} is not here")

    def _views(self, move: TensorMove) -> Iterator[Tensor]:
        """Yield the views into which a move to this actor writes."""
        for part, tensor in self._received[move.tensor].items():
            yield from _inside(part.part.pieces(tensor), move.box)


def _inside(pieces: Iterable[tuple[Box, Tensor]], box: Box) -> Iterator[Tensor]:
    """Yield the views of a box in those of larger boxes that have it."""
    for there, view in pieces:
        if common(there, box) == box:
            yield in_box(view, tuple((a - at, b - at) for (a, b), (at, _) in zip(box, there, strict=True)))
