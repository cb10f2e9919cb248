"""An actor's state on its way to another layout: what it has, what it needs, and the parts that arrive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.actors.checkpoint.shards import AtHand
from raypar.actors.collective.group import Group
from raypar.actors.relayout.exchange import exchange_tensors
from raypar.actors.relayout.moves import Box, Boxes, HeldTensors, Kind, TensorMove
from raypar.actors.sharding import Shape, Shard, Sharding

Spans = tuple[tuple[tuple[int, int], ...], ...]  # along each dim, those that an actor needs, one behind the other


class WantedTensor(NamedTuple):
    """A part of the state that an actor loads.

    Attributes:
        weight: The actor's name of the weight, or of another tensor.
        kept: Its optimizer state, such as ``exp_avg``; "" for the weight itself.
        tensors: Logical names; the first that there is is loaded.
        sharding: Which part of it.
    """

    weight: str
    kept: str
    tensors: tuple[str, ...]
    sharding: Sharding


class TensorPart(NamedTuple):
    """A part of a logical tensor that an actor needs.

    Attributes:
        tensor: The logical tensor's name.
        spans: Its indices along each dim.
    """

    tensor: str
    spans: Spans

    @property
    def boxes(self) -> list[Box]:
        """The boxes that it is made of."""
        return list(product(*self.spans))

    def view_of(self, made: Tensor, box: Box) -> Tensor | None:
        """Return the view of a box in a tensor that has this part; None if the box is not in it."""
        index = []
        for spans, (start, stop) in zip(self.spans, box, strict=True):
            place = 0
            for first, last in spans:
                if first <= start and stop <= last:
                    index.append(slice(place + start - first, place + stop - first))
                    break
                place += last - first
        return made[tuple(index)] if len(index) == len(box) else None


def wanted_parts(wishes: Iterable[WantedTensor], shapes: Mapping[str, Shape]) -> dict[tuple[str, str], TensorPart]:
    """Return which parts of logical tensors an actor loads: by weight and optimizer state, as it asks for them.

    Args:
        wishes: What it would load, if it is there.
        shapes: The shapes of all logical tensors that there are, by name.
    """
    found = dict[tuple[str, str], TensorPart]()
    for wish in wishes:
        tensor = next((name for name in wish.tensors if name in shapes), None)
        if tensor is not None:
            own = wish.sharding.for_dims(len(shapes[tensor]))
            spans = tuple(tuple(own[dim].spans(length)) for dim, length in enumerate(shapes[tensor]))
            found[wish.weight, wish.kept] = TensorPart(tensor, spans)
    return found


def boxes_of_parts(parts: Iterable[TensorPart]) -> Boxes:
    """Return the boxes that parts of tensors are made of, each once, by the tensor's name."""
    found: dict[str, dict[Box, None]] = {}
    for part in dict.fromkeys(parts):
        found.setdefault(part.tensor, {}).update(dict.fromkeys(part.boxes))
    return {tensor: tuple(boxes) for tensor, boxes in found.items()}


class Handover:
    """The state of one actor, copied to the host for the actors of another layout, and what it gets from them.

    Args:
        pieces: What the actor has: logical name, which part of the logical tensor (None for all of it), and the tensor.
        at: Returns a context in which some tensors can be read.
    """

    def __init__(self, pieces: Iterable[tuple[str, Shard | None, Tensor]] = (), at: AtHand = nullcontext) -> None:
        self._pieces: dict[str, dict[Box, Tensor]] = {}
        self._kinds: dict[str, Kind] = {}
        self._wishes: dict[tuple[str, str], TensorPart] = {}
        self._made: dict[str, dict[TensorPart, Tensor]] = {}  # by logical name
        for name, shard, tensor in pieces:
            shard = shard or Shard(tuple(tensor.shape))
            box = tuple(shard.span(dim) for dim in range(len(shard.whole)))
            if box not in self._pieces.setdefault(name, {}):
                with at([tensor]):
                    self._pieces[name][box] = tensor.detach().to("cpu", copy=True)
                self._kinds[name] = Kind(str(tensor.dtype).removeprefix("torch."), shard.whole)

    @property
    def holding(self) -> HeldTensors:
        """What the actor has."""
        return HeldTensors({name: tuple(boxes) for name, boxes in self._pieces.items()}, self._kinds)

    def want(self, wishes: Iterable[WantedTensor], kinds: Mapping[str, Kind]) -> Boxes:
        """Note what the actor loads in the new layout, and return the parts that this takes.

        Args:
            wishes: What it would load, if it is there.
            kinds: All logical tensors that there are.
        """
        self._kinds = dict(kinds)
        self._wishes = wanted_parts(wishes, {name: kind.shape for name, kind in kinds.items()})
        return boxes_of_parts(self._wishes.values())

    def pass_on(self, moves: Sequence[TensorMove], group: Group | None) -> None:
        """Give others what they need, and get what this actor needs. All actors of the group call it.

        Args:
            moves: All moves from or to this actor, in the same order as the others have them; their numbers are ranks
                in the group.
            group: The group of all actors that give or get something; None if nothing is sent.

        Raises:
            GroupError: Another actor failed, or is late.
        """
        rank = 0 if group is None else group.rank
        for part in dict.fromkeys(self._wishes.values()):
            kind = self._kinds[part.tensor]
            shape = [sum(stop - start for start, stop in spans) for spans in part.spans]
            made = torch.empty(shape, dtype=getattr(torch, kind.dtype))
            self._made.setdefault(part.tensor, {})[part] = made
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
        """Return what was asked for under a name; None if there is no such tensor."""
        part = self._wishes.get((weight, kept))
        return None if part is None else self._made[part.tensor][part]

    def _cut(self, move: TensorMove) -> Tensor:
        """Return a view of what a move takes from this actor."""
        for box, tensor in self._pieces[move.tensor].items():
            part = TensorPart(move.tensor, tuple((span,) for span in box))
            if (view := part.view_of(tensor, move.box)) is not None:
                return view
        raise LookupError(f"{move.tensor!r} {list(move.box)} is not here")

    def _views(self, move: TensorMove) -> Iterator[Tensor]:
        """Yield the places of what a move brings to this actor."""
        for part, made in self._made[move.tensor].items():
            if (view := part.view_of(made, move.box)) is not None:
                yield view
