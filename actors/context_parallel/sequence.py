"""How a sequence is divided over the context-parallel axis, and how attention reaches across."""

from __future__ import annotations

from raypar.actors.sharding import Portion
from raypar.actors.specs.types import Context


def pieces_of(context: Context, cp: int) -> int:
    """Into how many equal pieces a sequence is cut."""
    return 2 * cp if context in ("ring", "all_gather") else cp


def tokens_of(context: Context, cp: int) -> tuple[Portion, ...]:
    """The tokens of each member.

    Where attention is done by blocks, a causal one does more for later tokens: each member has an early piece and a
    late one, so that all have the same to do (zigzag).
    """
    if pieces_of(context, cp) == cp:
        return tuple(Portion.at(rank, cp) for rank in range(cp))
    return tuple(Portion(2 * cp, (rank, 2 * cp - 1 - rank)) for rank in range(cp))
