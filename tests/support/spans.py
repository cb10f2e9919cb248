"""The spans of all replicas that divide the elements of a tensor."""

from __future__ import annotations

from raypar.actors.sharding import ElementCut, Span, block_of


def cut_spans(elements: int, size: int, first: int) -> tuple[Span, ...]:
    """The span of each rank, in rank order; the first one belongs to rank ``first``. (0, 0) for those without any."""
    cut = ElementCut(block_of(elements), first, size)
    return tuple(cut.span(elements, rank) or (0, 0) for rank in range(size))
