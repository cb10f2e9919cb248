"""How context parallelism shards a sequence."""

from __future__ import annotations

from raypar.actors.sharding import Pieces
from raypar.actors.specs.types import Context


def num_pieces(context: Context, cp: int) -> int:
    """Return the number of equal pieces of a sequence.

    Args:
        context: How attention communicates; see ``context_styles``.
        cp: Number of context-parallel ranks.
    """
    return 2 * cp if context in ("ring", "all_gather") else cp


def tokens_of(context: Context, cp: int) -> tuple[Pieces, ...]:
    """Return the tokens of each context-parallel rank.

    If attention is computed in blocks, later tokens cost more, because each token attends to all earlier ones. So each
    rank holds one early and one late piece, and all ranks have the same work (zigzag).

    Args:
        context: How attention communicates; see ``context_styles``.
        cp: Number of context-parallel ranks.
    """
    if num_pieces(context, cp) == cp:
        return tuple(Pieces.at(rank, cp) for rank in range(cp))
    return tuple(Pieces(2 * cp, (rank, 2 * cp - 1 - rank)) for rank in range(cp))
