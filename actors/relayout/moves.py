"""Who sends which part of which tensor to whom, when a run goes on in another layout. Imports no torch.

What an actor has is a set of boxes of logical tensors, and so is what it needs. A part that it needs and has does not
move; every other part moves once, from one of those that have it. So the bytes that move are the bytes that actors
lack, and with these actors in these places no plan has fewer.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from heapq import heapreplace
from typing import NamedTuple

from raypar.actors.sharding import Shape

Box = tuple[tuple[int, int], ...]
"""along each dim of a tensor, the first index and the one behind the last; of a scalar ()"""
Boxes = Mapping[str, Sequence[Box]]
"""by logical name of a tensor, boxes of it"""


_BITS = re.compile(r"[0-9]+")  # in the name of a dtype; bool has a byte


class Kind(NamedTuple):
    """What a logical tensor is.

    Attributes:
        dtype: In torch's spelling, such as "float32".
        shape: Shape of the whole.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        bits = _BITS.search(self.dtype)
        return int(bits[0]) // 8 if bits else 1


class HeldTensors(NamedTuple):
    """What an actor has of the state.

    Attributes:
        boxes: Its parts, by logical name.
        kinds: The tensors that they are parts of, by logical name.
    """

    boxes: Boxes
    kinds: Mapping[str, Kind]


class TransferGroup(NamedTuple):
    """What one actor is told of the group of all actors that give or get something.

    Attributes:
        name: A name of no other group.
        size: Number of its members.
        rank: Rank of the actor in it.
        timeout: Deadline of a wait, in seconds.
    """

    name: str
    size: int
    rank: int
    timeout: float


class TensorMove(NamedTuple):
    """A part of a tensor that an actor gets.

    Attributes:
        source: Number of the actor that has it.
        destination: Number of the actor that needs it; if it is the source, nothing is sent.
        tensor: Logical name of the tensor.
        box: Which part of it.
    """

    source: int
    destination: int
    tensor: str
    box: Box

    @property
    def is_sent(self) -> bool:
        """Whether it goes from one actor to another."""
        return self.source != self.destination


def moves_between(
    held: Sequence[Boxes], wanted: Sequence[Boxes], sizes: Mapping[str, int], places: Sequence[str] = ()
) -> list[TensorMove]:
    """Plan what each actor gets from whom: what it has itself, from itself; the rest from its node if that has it.

    Of several that have a part equally near, the one gives it that has given the fewest bytes so far.

    Args:
        held: By actor, what it has. Boxes of one tensor on several actors are copies of the same.
        wanted: By actor, what it needs; as many actors.
        sizes: Bytes of an element of each tensor.
        places: By actor, what those of one node have in common; empty if all are on one.

    Returns:
        The moves, which cover each box that is wanted exactly once.

    Raises:
        LookupError: Nobody has a part that an actor needs.
    """
    moves, given = list[TensorMove](), Counter[int]()
    place = places or [""] * len(held)
    holders = defaultdict[str, dict[Box, _Holders]](dict)
    for actor, tensors in enumerate(held):
        for tensor, boxes in tensors.items():
            for box in dict.fromkeys(boxes):
                holders[tensor].setdefault(box, _Holders(given)).add(actor, place[actor])
    parts = {tensor: _Parts(of_one) for tensor, of_one in holders.items()}
    nothing = _Parts({})
    for actor, tensors in enumerate(wanted):
        for tensor, boxes in tensors.items():
            for box in dict.fromkeys(boxes):
                for source, part in _sources(actor, place[actor], box, parts.get(tensor, nothing), tensor):
                    moves.append(TensorMove(source, actor, tensor, part))
                    given[source] += (source != actor) * volume(part) * sizes[tensor]
    return moves


def bytes_between(moves: Sequence[TensorMove], sizes: Mapping[str, int]) -> int:
    """Return the bytes that go from one actor to another, given the bytes of an element of each tensor."""
    return sum(volume(move.box) * sizes[move.tensor] for move in moves if move.is_sent)


def box_at(offset: Shape, shape: Shape) -> Box:
    """Return the box that begins at some indices and has a shape."""
    return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))


def volume(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(stop - start for start, stop in box)


def common(one: Box, other: Box) -> Box | None:
    """Return the box that two boxes of a tensor have in common; None if they have no element in common."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(start < stop for start, stop in found) else None


def without(box: Box, part: Box) -> Iterator[Box]:
    """Yield boxes that make up a box without a part of it, each element once."""
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, part, strict=True)):
        for span in ((start, first), (last, stop)):
            if span[0] < span[1]:
                yield (*part[:dim], span, *box[dim + 1 :])


class _Holders:
    """The actors that have one box of a tensor.

    Args:
        given: By actor, the bytes that it gives so far.
    """

    def __init__(self, given: Mapping[int, int]) -> None:
        self._given = given
        self._actors, self._of_place = set[int](), defaultdict[str, list[tuple[int, int]]](list)
        self._all = list[tuple[int, int]]()  # this and the lists by place are heaps of bytes given and actors

    def add(self, actor: int, place: str) -> None:
        """Note that an actor has the box; actors are added in their order, before anything is given."""
        self._actors.add(actor)
        self._all.append((0, actor))
        self._of_place[place].append((0, actor))

    def distance(self, actor: int, place: str) -> int:
        """Return how far the nearest of them is from an actor: 0 if it is itself, 1 on its node, 2 elsewhere."""
        return 0 if actor in self._actors else 1 if place in self._of_place else 2

    def nearest(self, actor: int, place: str) -> int:
        """Return the actor from which another one gets the box: of the nearest, the one that gives least so far."""
        distance = self.distance(actor, place)
        if distance == 0:
            return actor
        heap = self._of_place[place] if distance == 1 else self._all
        while (now := self._given[heap[0][1]]) != heap[0][0]:  # it gives more than when it was noted
            heapreplace(heap, (now, heap[0][1]))
        return heap[0][1]


class BoxFinder:
    """The boxes of one tensor, found by where they are. They are in arrays, so that a copy is made in no time.

    Args:
        boxes: The boxes.
    """

    def __init__(self, boxes: Collection[Box]) -> None:
        self._dims = len(next(iter(boxes), ()))
        self._bounds = array("q", [bound for box in boxes for span in box for bound in span])
        starts = [self._bounds[2 * dim :: 2 * self._dims] for dim in range(self._dims)]
        self._dim = max(range(self._dims), key=lambda dim: len({*starts[dim]}), default=None)  # that divides it most
        self._order, self._starts, self._longest = array("i", range(len(boxes))), array("q"), 0
        if self._dim is not None:
            own = starts[self._dim]
            self._order = array("i", sorted(self._order, key=own.__getitem__))
            self._starts = array("q", [own[number] for number in self._order])
            self._longest = max(box[self._dim][1] - box[self._dim][0] for box in boxes)

    def near(self, box: Box) -> Sequence[int]:
        """Return the indices of the boxes that may have elements in common with this one; of all others none has."""
        if self._dim is None:
            return self._order
        start, stop = box[self._dim]
        first = bisect_right(self._starts, start - self._longest)
        return self._order[first : bisect_left(self._starts, stop)]

    def common(self, box: Box) -> list[int]:
        """Return the indices of the boxes that have elements in common with this one."""
        return [number for number in self.near(box) if common(box, self._box(number)) is not None]

    def _box(self, number: int) -> Box:
        bounds = self._bounds[2 * self._dims * number : 2 * self._dims * (number + 1)]
        return tuple(zip(bounds[::2], bounds[1::2], strict=True))


class _Parts:
    """The boxes of one tensor that actors have, found by where they are.

    Args:
        holders: Who has each box.
    """

    def __init__(self, holders: Mapping[Box, _Holders]) -> None:
        self._holders, self._boxes, self._finder = holders, list(holders), BoxFinder(holders)

    def near(self, box: Box, actor: int, place: str) -> list[tuple[Box, _Holders]]:
        """Return the boxes that may have elements in common with one, the nearest to an actor first."""
        found = [(self._boxes[number], number) for number in self._finder.near(box)]
        found.sort(key=lambda one: (self._holders[one[0]].distance(actor, place), one[1]))
        return [(held, self._holders[held]) for held, _ in found]


def _sources(actor: int, place: str, box: Box, parts: _Parts, tensor: str) -> Iterator[tuple[int, Box]]:
    """Yield from whom an actor gets the parts of a box that it needs, the nearest first."""
    missing = [box] if volume(box) else []
    for held, holders in parts.near(box, actor, place) if missing else ():
        for rest in list(missing):
            if (part := common(rest, held)) is None:
                continue
            yield holders.nearest(actor, place), part
            missing.remove(rest)
            missing += without(rest, part)
        if not missing:
            return
    if missing:
        raise LookupError(f"nobody has {tensor!r} {list(missing[0])}")
