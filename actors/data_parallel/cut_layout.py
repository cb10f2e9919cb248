"""How replicas divide the elements of tensors among them, and where the parts lie in a flat tensor."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.actors.collective.flat_cut import FlatCut
from raypar.actors.sharding import ElementCut, Shard, Span, block_of
from raypar.actors.tensors import memory_order

_ALIGNMENT = 64  # elements: tensors begin at multiples of it, so that the kernels' vectors are aligned


class ReplicaCut(NamedTuple):
    """How the replicas of a tensor divide its elements among them: see ``ElementCut``.

    With hybrid sharding each copy of the model is divided among its replicas, and copies divide what they save.

    Attributes:
        first: The rank that has the beginning of the tensor, of the ranks of all copies.
        rank: The rank of this actor in the group of the replicas of its copy.
        size: The number of replicas of a copy.
        copy: The index of this actor's copy.
        copies: The number of copies.
    """

    first: int
    rank: int
    size: int
    copy: int = 0
    copies: int = 1

    def holders(self, elements: int) -> dict[int, Span]:
        """Return the span of each rank that holds a part of a tensor with this many elements.

        Of a tensor without elements, the first rank holds the empty part.
        """
        cut = self.stored(elements).of_one_copy
        return {rank: span for rank in range(self.size) if (span := cut.span(elements, rank)) is not None}

    def shard(self, parameter: Tensor) -> Shard | None:
        """Return the part of a parameter that this actor holds, a span or the whole; None if it holds nothing of it.

        Args:
            parameter: The parameter as the actor's tensor group leaves it.
        """
        if self.size == 1:
            return Shard(tuple(parameter.shape))
        span = self.holders(parameter.numel()).get(self.rank)
        if span is None:
            return None
        shape, order = tuple(parameter.shape), memory_order(torch.empty_like(parameter, device="meta"))
        order_or_none = None if order == tuple(range(len(shape))) else order
        return Shard(shape, elements=span, order=order_or_none)

    def stored(self, elements: int) -> ElementCut:
        """Return the division of a tensor with this many elements among all that store a part of it."""
        return ElementCut(block_of(elements), self.first, self.size, self.copies)

    def stored_span(self, elements: int) -> Span | None:
        """Return the span of such a tensor that this actor stores; None if it stores nothing of it."""
        return self.stored(elements).span(elements, self.copy * self.size + self.rank)


class CutLayout:
    """The layout of a flat tensor with several parameters, each of which replicas divide among them.

    Each parameter is contiguous in its own memory order. After the parameters come flags, one for each parameter and
    each rank that holds a part of it, the flags of a rank in a row: so the part of a rank has the flags of its
    parameters.

    Args:
        parameters: The parameters by logical name, in the order of the flat tensor.
        cuts: How the replicas divide each of them; all have the same replicas.

    Attributes:
        starts: Where each parameter begins, by logical name.
        elements: Elements of the flat tensor without the flags.
        flagged: The parameter of each flag, by logical name.
        own: The span that this actor holds of each parameter, counted from the parameter's beginning. Parameters of
            which it holds nothing are missing.
        cut: The parts of the ranks, without the flags.
        summed: The parts of the ranks with their flags.
    """

    def __init__(self, parameters: Mapping[str, Tensor], cuts: Mapping[str, ReplicaCut]) -> None:
        *starts, self.elements = accumulate((_aligned(p.numel()) for p in parameters.values()), initial=0)
        self.starts = dict(zip(parameters, starts, strict=True))
        self._rank, size = next((cuts[name].rank, cuts[name].size) for name in parameters)
        holders = {name: cuts[name].holders(p.numel()) for name, p in parameters.items()}
        spans = list[tuple[Span, ...]]()
        flags = list[Span]()
        flagged = list[str]()
        for rank in range(size):
            held = {name: one[rank] for name, one in holders.items() if rank in one}
            spans.append(
                tuple((self.starts[name] + span[0], self.starts[name] + span[1]) for name, span in held.items())
            )
            first = self.elements + len(flagged)
            flagged += held
            flags.append((first, first + len(held)))
        self.own = {name: one[self._rank] for name, one in holders.items() if self._rank in one}
        self.flagged = tuple(flagged)
        self.cut = FlatCut(tuple(spans))
        self.summed = FlatCut(tuple((*own, run) for own, run in zip(spans, flags, strict=True)))
        counts = (stop - start for start, stop in self.own.values())
        self._packed = dict(zip(self.own, accumulate(counts, initial=0), strict=False))

    @property
    def size(self) -> int:
        """Elements of the flat tensor with the flags."""
        return self.elements + len(self.flagged)

    @property
    def count(self) -> int:
        """Elements of this actor's part, without the flags."""
        return self.cut.counts[self._rank]

    @property
    def summed_count(self) -> int:
        """Elements of this actor's part with its flags."""
        return self.summed.counts[self._rank]

    def span(self, name: str, flat: Tensor) -> Tensor:
        """Return the view (elements,) of this actor's part of a parameter in the flat tensor."""
        start, (first, stop) = self.starts[name], self.own[name]
        return flat[start + first : start + stop]

    def part(self, name: str, own: Tensor) -> Tensor:
        """Return the view (elements,) of this actor's part of a parameter in this actor's packed part."""
        first, stop = self.own[name]
        return own[self._packed[name] :][: stop - first]

    def own_flags(self, flat: Tensor) -> Tensor:
        """Return the view of the flags of this actor's part, in the order of ``own``, in a flat tensor (size,)."""
        start, stop = self.summed.spans[self._rank][-1]
        return flat[start:stop]


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT
