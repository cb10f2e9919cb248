"""Shardings: which slices of a logical tensor an actor holds, and which span of a slice's elements a replica holds.

Tensor parallelism, context parallelism, even shards and the checkpoint describe parts of tensors in these terms.
Importing this file does not import torch, so that a driver can read shardings without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import TYPE_CHECKING, Annotated, NamedTuple

from annotated_types import Ge, Le

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""along each dim of a tensor, the first index and the one after the last; () for a scalar"""
Span = tuple[int, int]  # of consecutive elements: the first one, and the one after the last

BLOCK, SMALL_BLOCK = 1024, 64  # elements of a block of a large tensor, and of a small one
SMALL = 1 << 16  # elements from which a tensor is large
NORM_SCRATCH = 128 << 20  # bytes of blocks whose norms a GPU computes at a time, to launch few kernels
MAX_RANKS = 1 << 16  # that divide a tensor


def block_of(elements: int) -> int:
    """Return the elements of a block of a tensor: 1,024, or 64 if it has less than 65,536 elements.

    Both are multiples of every vector of the kernels (AVX-512: 16 fp32 or 32 bf16; GPUs: 4 elements a thread). So a
    tensor can be cut between blocks, and no element moves between a kernel's vector body and its tail.
    """
    return SMALL_BLOCK if elements < SMALL else BLOCK


def num_blocks(elements: int) -> int:
    """Return the number of blocks of a tensor, the last of which may be short."""
    return -(-elements // block_of(elements))


@dataclass(frozen=True)
class ElementCut:
    """A division of the elements of a tensor into contiguous spans of whole blocks, one a rank.

    The first span belongs to rank ``first``, the next ones to the ranks after it, and after the last rank comes rank 0.
    The first spans have one block more where the blocks can't be divided evenly. The last block may be short.

    Of several copies, all ranks of one come first, then those of the next. The ranks of a copy divide the tensor, and
    the ranks with the same position in their copies divide its span among them likewise. If ``first`` is the number of
    blocks before the tensor, as in ``first_ranks``, surplus blocks go round all ranks of all copies.

    Attributes:
        block: Elements of a block.
        first: Rank that has the beginning of the tensor, from 0 to num_ranks - 1.
        size: Number of ranks of a copy, 1 or more.
        copies: Number of copies, 1 or more.
    """

    block: Annotated[int, Ge(1), Le(1 << 48)]
    first: Annotated[int, Ge(0)]
    size: Annotated[int, Ge(1), Le(MAX_RANKS)]
    copies: Annotated[int, Ge(1), Le(MAX_RANKS)] = 1

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all copies."""
        return self.size * self.copies

    @property
    def of_one_copy(self) -> ElementCut:
        """The division among the ranks of one copy, which hold the spans that copies divide."""
        return ElementCut(self.block, self.first % self.size, self.size)

    def reaches_all(self, elements: int) -> bool:
        """Return whether every rank has a block or more of a tensor with this many elements."""
        return -(-elements // self.block) >= self.num_ranks

    def span(self, elements: int, rank: int) -> Span | None:
        """Return the span of a rank; None if it holds nothing. The first rank holds the empty span of no elements.

        Args:
            elements: Elements of the tensor.
            rank: The rank.
        """
        if self.copies > 1:
            copy, of_copy = divmod(rank, self.size)
            if (held := self.of_one_copy.span(elements, of_copy)) is None:
                return None
            inside = self._among_copies(of_copy).span(held[1] - held[0], copy)
            return None if inside is None else (held[0] + inside[0], held[0] + inside[1])
        position, blocks = (rank - self.first) % self.size, -(-elements // self.block)
        if position >= max(1, min(self.size, blocks)):
            return None
        base, longer = divmod(blocks, self.size)
        start = self.block * (position * base + min(position, longer))
        return start, min(start + self.block * (base + (position < longer)), elements)

    def ranks(self, elements: int, span: Span) -> Iterator[int]:
        """Yield the ranks whose spans have an element of a span of the tensor, in the order of their spans.

        Args:
            elements: Elements of the tensor.
            span: The span; the empty one at the beginning of a tensor belongs to the first rank.
        """
        start, stop = span
        if self.copies > 1:
            for rank in self.of_one_copy.ranks(elements, span):
                held = self.of_one_copy.span(elements, rank)
                assert held is not None, "it has an element, or is the first"
                inside = max(start, held[0]) - held[0], min(stop, held[1]) - held[0]
                copies = self._among_copies(rank).ranks(held[1] - held[0], inside)
                yield from (copy * self.size + rank for copy in copies)
            return
        base, longer = divmod(-(-elements // self.block), self.size)
        block, before = start // self.block, longer * (base + 1)  # blocks of the longer spans
        position = block // (base + 1) if block < before else longer + (block - before) // max(base, 1)
        at = (self.first + position) % self.size
        while (own := self.span(elements, at)) is not None and own[0] < max(stop, 1):
            yield at
            at, position = (at + 1) % self.size, position + 1
            if position == self.size:
                return

    def _among_copies(self, rank: int) -> ElementCut:
        """Return the division of the span of a rank of one copy among the copies."""
        rounds, rest = divmod(self.first, self.size)
        return ElementCut(self.block, (rounds + (rank < rest)) % self.copies, self.copies)


def first_ranks(elements: Mapping[str, int], size: int) -> dict[str, int]:
    """Return the rank at which each tensor begins: the blocks as large before it, modulo the number of ranks.

    So the surplus blocks of the tensors go round all ranks and do not add up on one. Small blocks and large ones go
    round by themselves: else the small ones would move the large ones on as if they weighed as much.

    Args:
        elements: Elements of each tensor that the ranks cut, in the order of the names of the WHOLE model. If a tensor
            group divides it, those of the largest slice, so that all its members have the same result; the logical
            tensors' would not do, as their surplus blocks are not those of slices. Experts that actors divide are a
            mapping of their own.
        size: Number of ranks.
    """
    found, before = dict[str, int](), dict.fromkeys((BLOCK, SMALL_BLOCK), 0)
    for name, count in elements.items():
        block = block_of(count)
        found[name] = before[block] % size
        before[block] += num_blocks(count)
    return found


@dataclass(frozen=True)
class Pieces:
    """The pieces of a dim that an actor holds.

    The dim is cut into ``count`` pieces. If its length is not divisible, the first pieces are longer by one.

    Attributes:
        count: Number of pieces of the whole dim.
        own: Indices of the pieces that the actor holds, in the order in which it holds them.
    """

    count: int = 1
    own: tuple[int, ...] = (0,)

    @classmethod
    def at(cls, rank: int, size: int) -> Pieces:
        """Return the piece of one rank, of a dim that is cut into one piece a rank."""
        return cls(size, (rank,))

    @property
    def are_adjacent(self) -> bool:
        """Whether the pieces follow each other in the whole dim, so that they are one slice of it."""
        return self.own == tuple(range(self.own[0], self.own[0] + len(self.own)))

    def then(self, inner: Pieces) -> Pieces:
        """Compose two shardings of a dim: the pieces ``inner`` of these pieces.

        The dim's length must be divisible by the count of the result, which is the least that can express it.
        """
        finer = inner.count // math.gcd(inner.count, len(self.own))  # each piece is cut into this many
        pieces = [piece * finer + i for piece in self.own for i in range(finer)]
        size = len(pieces) // inner.count
        return Pieces(self.count * finer, tuple(pieces[part * size + i] for part in inner.own for i in range(size)))

    def span(self, length: int) -> tuple[int, int]:
        """Return the first index of the held slice of a dim of this length, and the index after its last.

        Raises:
            ValueError: The pieces are not adjacent.
        """
        if not self.are_adjacent:
            raise ValueError(f"pieces {self.own} of {self.count} are not one slice")
        return self._start(length, self.own[0]), self._start(length, self.own[-1] + 1)

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Return the first index of each held piece of a dim of this length, and the index after its last.

        Adjacent pieces are one span.
        """
        if self.are_adjacent:
            return [self.span(length)]
        return [(self._start(length, piece), self._start(length, piece + 1)) for piece in self.own]

    def whole_length(self, length: int) -> int:
        """Return the length of the whole dim from the length that the actor holds; all pieces must be equal."""
        return length * self.count // len(self.own)

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """Return the held pieces of a tensor along ``dim``: a view if they are adjacent, else a copy.

        Pieces that are not adjacent must be equal.
        """
        if self.count == 1:
            return whole
        if self.are_adjacent:
            start, stop = self.span(whole.shape[dim])
            return whole.narrow(dim, start, stop - start)
        pieces = whole.unflatten(dim, (self.count, -1))
        taken: Tensor = pieces[(slice(None),) * (dim % whole.dim()) + (list(self.own),)]
        return taken.flatten(dim % whole.dim(), dim % whole.dim() + 1)

    def _start(self, length: int, piece: int) -> int:
        base, longer = divmod(length, self.count)
        return piece * base + min(piece, longer)


class Part(NamedTuple):
    """A part of a tensor of known shape: some indices along each dim, or a span of the elements at these.

    Attributes:
        spans: Along each dim, spans of indices, in the order in which the part has them.
        elements: The span of the elements at these indices, in memory order; None for all. There is one span of indices
            along each dim then.
        order: The dims in memory order, outermost first; None for row-major. It matters for spans of elements only.
    """

    spans: tuple[tuple[Span, ...], ...]
    elements: Span | None = None
    order: tuple[int, ...] | None = None

    @property
    def shape(self) -> Shape:
        """The shape of a tensor that has the part."""
        if self.elements is not None:
            return (self.elements[1] - self.elements[0],)
        return tuple(sum(stop - start for start, stop in dim) for dim in self.spans)

    def boxes(self) -> list[Box]:
        """Return the boxes of the part: one for each combination of spans of indices, or those of a span of elements.

        A span of elements of a tensor of d dims has at most 2 d - 1. They are in its order, and the elements of each
        follow each other in it.
        """
        if self.elements is None:
            return list(product(*self.spans))
        dims = self._dims
        found = list[Box]()
        for box in _boxes([stop - start for start, stop in (self.spans[dim][0] for dim in dims)], *self.elements):
            by_dim = dict(zip(dims, box, strict=True))
            at = [start for ((start, _),) in self.spans]
            found.append(tuple((at[dim] + by_dim[dim][0], at[dim] + by_dim[dim][1]) for dim in range(len(at))))
        return found

    def pieces(self, held: Tensor) -> list[tuple[Box, Tensor]]:
        """Return the boxes of the part, each with its view of a tensor that has the part.

        Args:
            held: The tensor, of the part's shape.
        """
        boxes = self.boxes()
        if self.elements is None:
            ends = [[*accumulate((stop - start for start, stop in dim), initial=0)] for dim in self.spans]
            places = product(*([slice(*ends[at : at + 2]) for at in range(len(ends) - 1)] for ends in ends))
            return [(box, held[place]) for box, place in zip(boxes, places, strict=True)]
        dims, found, start = self._dims, list[tuple[Box, "Tensor"]](), 0
        by_dim = [dims.index(dim) for dim in range(len(dims))]
        for box in boxes:
            sizes = [box[dim][1] - box[dim][0] for dim in dims]
            stop = start + math.prod(sizes)
            found.append((box, held[start:stop].view(sizes).permute(by_dim)))
            start = stop
        return found

    @property
    def _dims(self) -> tuple[int, ...]:
        return tuple(range(len(self.spans))) if self.order is None else self.order


@dataclass(frozen=True)
class Sharding:
    """The slices of a logical tensor that an actor holds, for any shape of the tensor.

    Attributes:
        dims: The held pieces by dim; other dims are whole. A dim may be negative, for tensors of different numbers of
            dims.
    """

    dims: Mapping[int, Pieces] = field(default_factory=dict)

    def __getitem__(self, dim: int) -> Pieces:
        """Return the held pieces of a dim."""
        return self.dims.get(dim, _ALL)

    def then(self, inner: Sharding) -> Sharding:
        """Compose two shardings: the slices ``inner`` of the slices of this sharding."""
        return Sharding({**self.dims, **{dim: self[dim].then(pieces) for dim, pieces in inner.dims.items()}})

    def for_dims(self, num_dims: int) -> Sharding:
        """Return this sharding for tensors of ``num_dims`` dims, without negative dims; scalars are not sharded."""
        return Sharding({dim % num_dims: pieces for dim, pieces in self.dims.items() if num_dims})

    def part(self, shape: Sequence[int]) -> Part:
        """Return the held part of a tensor of this shape."""
        own = self.for_dims(len(shape))
        return Part(tuple(tuple(own[dim].spans(length)) for dim, length in enumerate(shape)))

    def take(self, whole: Tensor) -> Tensor:
        """Return the held part of a tensor: a view if it is one slice, else a copy."""
        for dim, pieces in self.dims.items():
            whole = pieces.take(whole, dim)
        return whole

    def whole_shape(self, held: Sequence[int]) -> Shape:
        """Return the whole tensor's shape from the shape that the actor holds; dims must not be negative."""
        return tuple(self[dim].whole_length(length) for dim, length in enumerate(held))


@dataclass(frozen=True)
class Shard:
    """The part that an actor holds of a logical tensor of known shape: one slice along each dim, or a span of it.

    A tensor group cuts the tensor first; then replicas cut each slice into spans of elements.

    Attributes:
        whole: Shape of the logical tensor.
        sharding: The slices that the actor's tensor group leaves to it; dims are not negative.
        elements: The span of the elements of these slices that the actor holds, in memory order; None for all.
        order: The dims in memory order, outermost first; None for row-major. It matters for spans only.
        cut: The division of the elements of the slices of which ``elements`` is one span, if the part is stored.
    """

    whole: Shape
    sharding: Sharding = Sharding()
    elements: Span | None = None
    order: tuple[int, ...] | None = None
    cut: ElementCut | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is not sharded at all."""
        return not self.sharding.dims and self.elements is None

    @property
    def offset(self) -> Shape:
        """Where the slices begin in the logical tensor."""
        return tuple(self.span(dim)[0] for dim in range(len(self.whole)))

    @property
    def shape(self) -> Shape:
        """The shape of the slices, of which the actor may hold a span only."""
        return tuple(stop - start for start, stop in map(self.span, range(len(self.whole))))

    def span(self, dim: int) -> Span:
        """Return the first index of the slice along a dim, and the index after its last."""
        return self.sharding[dim].span(self.whole[dim])

    @property
    def part(self) -> Part:
        """The part of the logical tensor."""
        return self.sharding.part(self.whole)._replace(elements=self.elements, order=self.order)

    def boxes(self) -> list[Box]:
        """Return the part as boxes of the logical tensor: see ``Part.boxes``."""
        return self.part.boxes()

    def take(self, whole: Tensor) -> Tensor:
        """Return the part of the logical tensor.

        Returns:
            A view of the slices; of a span, a view (count,) if the slices are dense in memory order, else a copy.
        """
        part = self.sharding.take(whole)
        if self.elements is None:
            return part
        start, stop = self.elements
        part = part if self.order is None else part.permute(self.order)
        if part.is_contiguous():
            return part.view(-1)[start:stop]
        taken = whole.new_empty(stop - start)
        for box, piece in self.part.pieces(taken):
            piece.copy_(in_box(whole, box))
        return taken

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Copy the part into the logical tensor: the inverse of ``take``.

        Args:
            whole: The logical tensor, of any strides.
            part: The part, as ``take`` returns it.
        """
        if self.elements is None:
            self.sharding.take(whole).copy_(part)
            return
        for box, piece in self.part.pieces(part):
            in_box(whole, box).copy_(piece)


def box_at(offset: Shape, shape: Shape) -> Box:
    """Return the box with an offset and a shape."""
    return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))


def volume(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(stop - start for start, stop in box)


def common(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes of a tensor; None if it is empty."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(start < stop for start, stop in found) else None


def in_box(tensor: Tensor, box: Box) -> Tensor:
    """Return the view of a box of a tensor."""
    return tensor[tuple(slice(*span) for span in box)]


def join_shards(shards: Sequence[Shard], held: Sequence[Tensor]) -> Tensor:
    """Join the parts of a logical tensor that several actors hold.

    Args:
        shards: Each actor's part; if the tensor is not sharded, every actor holds all of it.
        held: The actors' tensors, in the same order.
    """
    if shards[0].is_whole:
        return held[0]
    whole = held[0].new_empty(shards[0].whole)
    for shard, part in zip(shards, held, strict=True):
        shard.put(whole, part)
    return whole


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that make up a span of the elements of a row-major tensor, in its order."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    (first, skipped), (last, rest) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from (((first, first + 1), *box) for box in _boxes(shape[1:], skipped, rest))
        return
    if skipped:
        yield from (((first, first + 1), *box) for box in _boxes(shape[1:], skipped, row))
        first += 1
    if first < last:
        yield ((first, last), *((0, length) for length in shape[1:]))
    yield from (((last, last + 1), *box) for box in _boxes(shape[1:], 0, rest))


_ALL = Pieces()
