"""Shardings: which slices of a logical tensor an actor holds.

Tensor parallelism, context parallelism and the checkpoint describe parts of tensors in these terms. Importing this file
does not import torch, so that a driver can read shardings without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

BLOCK, SMALL_BLOCK = 1024, 64  # elements of a block of a large tensor, and of a small one
SMALL = 1 << 16  # elements from which a tensor is large


def block_of(elements: int) -> int:
    """Return the elements of a block of a tensor: 1,024, or 64 if it has less than 65,536 elements.

    Both are multiples of every vector of the kernels (AVX-512: 16 fp32 or 32 bf16; GPUs: 4 elements a thread). So a
    tensor can be cut between blocks, and no element moves between a kernel's vector body and its tail.
    """
    return SMALL_BLOCK if elements < SMALL else BLOCK


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
    """The part that an actor holds of a logical tensor of known shape: one slice along each dim.

    Attributes:
        whole: Shape of the logical tensor.
        sharding: The slices that the actor holds; dims are not negative.
    """

    whole: Shape
    sharding: Sharding = Sharding()

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is not sharded at all."""
        return not self.sharding.dims

    @property
    def offset(self) -> Shape:
        """Where the part begins in the logical tensor."""
        return tuple(self.span(dim)[0] for dim in range(len(self.whole)))

    @property
    def shape(self) -> Shape:
        """The part's shape."""
        return tuple(stop - start for start, stop in map(self.span, range(len(self.whole))))

    def span(self, dim: int) -> tuple[int, int]:
        """Return the first index of the part along a dim, and the index after its last."""
        return self.sharding[dim].span(self.whole[dim])

    def take(self, whole: Tensor) -> Tensor:
        """Return a view of the part of the logical tensor."""
        return self.sharding.take(whole)


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
        shard.take(whole).copy_(part)
    return whole


_ALL = Pieces()
