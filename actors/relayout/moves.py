"""The moves of tensors between actors when a run changes its layout. Imports no torch.

An actor has, and needs, a set of boxes of logical tensors. A part that it needs and has does not move; every other part
moves once, from one of the actors that have it. So the bytes that move are the bytes that actors lack, and with this
assignment of actors to ranks no plan moves fewer. ``assigned`` finds the assignment that moves the fewest bytes.
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

from raypar.actors.sharding import Box, common, volume

Boxes = Mapping[str, Sequence[Box]]
"""by logical name of a tensor, boxes of it"""
_BITS = re.compile(r"[0-9]+")  # in the name of a dtype; bool has a byte


class Kind(NamedTuple):
    """The dtype and shape of a logical tensor.

    Attributes:
        dtype: The dtype in torch's spelling, such as "float32".
        shape: Shape of the whole tensor.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        bits = _BITS.search(self.dtype)
        return int(bits[0]) // 8 if bits else 1


class HeldTensors(NamedTuple):
    """The parts of the state that an actor has.

    Attributes:
        boxes: The parts, by logical name.
        kinds: The logical tensors, by name.
    """

    boxes: Boxes
    kinds: Mapping[str, Kind]


class TransferGroup(NamedTuple):
    """One actor's view of the group of all senders and receivers.

    Attributes:
        name: A unique name.
        size: Number of its members.
        rank: Rank of the actor in it.
        timeout: Deadline of a wait, in seconds.
    """

    name: str
    size: int
    rank: int
    timeout: float


class TensorMove(NamedTuple):
    """The move of a part of a tensor to an actor.

    Attributes:
        source: Number of the actor that has it.
        destination: Number of the actor that needs it; if it is the source, nothing is sent.
        tensor: Logical name of the tensor.
        box: The part.
    """

    source: int
    destination: int
    tensor: str
    box: Box

    @property
    def is_sent(self) -> bool:
        """Whether its source and destination differ."""
        return self.source != self.destination


def moves_between(
    held: Sequence[Boxes], wanted: Sequence[Boxes], sizes: Mapping[str, int], nodes: Sequence[str] = ()
) -> list[TensorMove]:
    """Plan the source of each part that actors need: the actor itself, else one on its node, else any other.

    Among equally near actors that have a part, the one that sends the fewest bytes so far is the source.

    Args:
        held: By actor, the boxes that it has. Equal boxes of a tensor on several actors are copies.
        wanted: By actor, the boxes that it needs; as many actors.
        sizes: Bytes of an element of each tensor.
        nodes: By actor, the name of its node; empty if all are on one.

    Returns:
        The moves, which cover each wanted box exactly once.

    Raises:
        LookupError: No actor has a part that an actor needs.
    """
    moves, given = list[TensorMove](), Counter[int]()
    node = nodes or [""] * len(held)
    holders = defaultdict[str, dict[Box, _Holders]](dict)
    for actor, tensors in enumerate(held):
        for tensor, boxes in tensors.items():
            for box in dict.fromkeys(boxes):
                holders[tensor].setdefault(box, _Holders(given)).add(actor, node[actor])
    parts = {tensor: _Parts(of_one) for tensor, of_one in holders.items()}
    nothing = _Parts({})
    for actor, tensors in enumerate(wanted):
        for tensor, boxes in tensors.items():
            for box in dict.fromkeys(boxes):
                for source, part in _sources(actor, node[actor], box, parts.get(tensor, nothing), tensor):
                    moves.append(TensorMove(source, actor, tensor, part))
                    given[source] += (source != actor) * volume(part) * sizes[tensor]
    return moves


def without(box: Box, part: Box) -> Iterator[Box]:
    """Yield disjoint boxes that cover a box without a part of it."""
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, part, strict=True)):
        for span in ((start, first), (last, stop)):
            if span[0] < span[1]:
                yield (*part[:dim], span, *box[dim + 1 :])


class _Holders:
    """The actors that have one box of a tensor.

    Args:
        given: By actor, the bytes that it sends so far.
    """

    def __init__(self, given: Mapping[int, int]) -> None:
        self._given = given
        self._actors, self._on_node = set[int](), defaultdict[str, list[tuple[int, int]]](list)
        self._all = list[tuple[int, int]]()  # this and the lists by node are heaps of (bytes sent, actor)

    def add(self, actor: int, node: str) -> None:
        """Add an actor that has the box. Actors are added in their order, before any move."""
        self._actors.add(actor)
        self._all.append((0, actor))
        self._on_node[node].append((0, actor))

    def distance(self, actor: int, node: str) -> int:
        """Return the distance of the nearest holder from an actor: 0 if it is itself, 1 on its node, else 2."""
        return 0 if actor in self._actors else 1 if node in self._on_node else 2

    def nearest(self, actor: int, node: str) -> int:
        """Return the source of the box for an actor: among the nearest holders, the one that sends least so far."""
        distance = self.distance(actor, node)
        if distance == 0:
            return actor
        heap = self._on_node[node] if distance == 1 else self._all
        while (now := self._given[heap[0][1]]) != heap[0][0]:  # it sends more than its entry in the heap says
            heapreplace(heap, (now, heap[0][1]))
        return heap[0][1]


class BoxFinder:
    """An index of the boxes of one tensor by position. It consists of arrays, which are fast to copy.

    Args:
        boxes: The boxes.
    """

    def __init__(self, boxes: Collection[Box]) -> None:
        self._dims = len(next(iter(boxes), ()))
        self._bounds = array("q", [bound for box in boxes for span in box for bound in span])
        starts = [self._bounds[2 * dim :: 2 * self._dims] for dim in range(self._dims)]
        self._dim = max(range(self._dims), key=lambda dim: len({*starts[dim]}), default=None)  # with the most starts
        self._order, self._starts, self._longest = array("i", range(len(boxes))), array("q"), 0
        if self._dim is not None:
            own = starts[self._dim]
            self._order = array("i", sorted(self._order, key=own.__getitem__))
            self._starts = array("q", [own[number] for number in self._order])
            self._longest = max(box[self._dim][1] - box[self._dim][0] for box in boxes)

    def near(self, box: Box) -> Sequence[int]:
        """Return the indices of a superset of the boxes that intersect this one."""
        if self._dim is None:
            return self._order
        start, stop = box[self._dim]
        first = bisect_right(self._starts, start - self._longest)
        return self._order[first : bisect_left(self._starts, stop)]

    def common(self, box: Box) -> list[int]:
        """Return the indices of the boxes that intersect this one."""
        return [number for number in self.near(box) if common(box, self._box(number)) is not None]

    def _box(self, number: int) -> Box:
        bounds = self._bounds[2 * self._dims * number : 2 * self._dims * (number + 1)]
        return tuple(zip(bounds[::2], bounds[1::2], strict=True))


class _Parts:
    """An index of the boxes of one tensor that actors have.

    Args:
        holders: The holders of each box.
    """

    def __init__(self, holders: Mapping[Box, _Holders]) -> None:
        self._holders, self._boxes, self._finder = holders, list(holders), BoxFinder(holders)

    def near(self, box: Box, actor: int, node: str) -> list[tuple[Box, _Holders]]:
        """Return a superset of the boxes that intersect one, the nearest to an actor first."""
        found = [(self._boxes[number], number) for number in self._finder.near(box)]
        found.sort(key=lambda one: (self._holders[one[0]].distance(actor, node), one[1]))
        return [(held, self._holders[held]) for held, _ in found]


def _sources(actor: int, node: str, box: Box, parts: _Parts, tensor: str) -> Iterator[tuple[int, Box]]:
    """Yield the sources and parts of a box that an actor needs, the nearest first."""
    missing = [box] if volume(box) else []
    for held, holders in parts.near(box, actor, node) if missing else ():
        for rest in list(missing):
            if (part := common(rest, held)) is None:
                continue
            yield holders.nearest(actor, node), part
            missing.remove(rest)
            missing += without(rest, part)
        if not missing:
            return
    if missing:
        raise LookupError(f"nobody has {tensor!r} {list(missing[0])}")


def lacking(held: Sequence[Boxes], wanted: Sequence[Boxes], sizes: Mapping[str, int]) -> list[list[int]]:
    """Return the bytes that each actor lacks for each rank, by rank, then by actor.

    Args:
        held: By actor, the boxes that it has; its boxes of one tensor are disjoint.
        wanted: By rank, the boxes that it needs.
        sizes: Bytes of an element of each tensor.
    """
    costs = []
    for tensors in wanted:
        every = {(tensor, box): volume(box) * sizes[tensor] for tensor, boxes in tensors.items() for box in boxes}
        total, row = sum(every.values()), []
        for has in held:
            shared = 0
            for tensor, box in every:
                parts = (common(box, other) for other in has.get(tensor, ()))
                shared += sum(volume(part) for part in parts if part is not None) * sizes[tensor]
            row.append(total - shared)
        costs.append(row)
    return costs


def assigned(costs: Sequence[Sequence[float]]) -> list[int]:
    """Return a distinct column for each row, so that the sum of their costs is least.

    Args:
        costs: By row, the cost of each column; at least as many columns as rows.

    Source: Kuhn 1955, "The Hungarian Method for the Assignment Problem", with the potentials of Jonker and Volgenant
    1987: n^2 m steps for n rows and m columns.
    """
    rows, columns = len(costs), len(costs[0]) if costs else 0
    of_row, of_column = [0.0] * (rows + 1), [0.0] * (columns + 1)
    taken, before = [0] * (columns + 1), [0] * (columns + 1)  # rows and columns are counted from 1; 0: none
    for row in range(1, rows + 1):
        taken[0], column = row, 0
        least, used = [math.inf] * (columns + 1), [False] * (columns + 1)
        while taken[column]:
            used[column] = True
            here = taken[column]
            delta = math.inf
            then = 0
            for other in range(1, columns + 1):
                if used[other]:
                    continue
                cost = costs[here - 1][other - 1] - of_row[here] - of_column[other]
                if cost < least[other]:
                    least[other], before[other] = cost, column
                if least[other] < delta:
                    delta, then = least[other], other
            for other in range(columns + 1):
                if used[other]:
                    of_row[taken[other]] += delta
                    of_column[other] -= delta
                else:
                    least[other] -= delta
            column = then
        while column:
            taken[column] = taken[before[column]]
            column = before[column]
    by_row = {row: column for column, row in enumerate(taken) if column and row}
    return [by_row[row] - 1 for row in range(1, rows + 1)]
