"""An exchange of tensors that are one piece each, as those of most ops are: with as little Python as it takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from raypar.actors.group import nbytes
from raypar.actors.transport.flow import Flow
from raypar.actors.transport.mailbox import Mailbox, Use


class Swap(Flow):
    """Give flat tensors to these peers, and let ``use`` have what those in ``totals`` give, so many bytes each.

    lend  whether windows may be read where they stand
    """

    def __init__(
        self,
        box: Mailbox,
        channel: int,
        give: Sequence[tuple[Tensor, Sequence[int]]],
        totals: Mapping[int, int],
        dtype: torch.dtype,
        use: Use,
        *,
        peers: Collection[int],
        lend: bool = True,
        queue: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(peers, queue)
        self._box, self._channel, self._give = box, channel, give
        self._totals, self._dtype, self._use, self._lend = totals, dtype, use, lend
        self._lent = [flat for flat, _ in give if lend and box.is_window(flat)]
        self._posted, self._used = not give, not totals

    def needs(self, peer: int) -> bool:
        """Not one who has given what it had to, and was sent what it had to get: it may leave before the others."""
        gives = peer in self._totals and not self._used and not self._box.have(self._channel, [peer])
        gets = any(peer in peers for _, peers in self._give)
        return gives or (gets and not (self._posted and self._box.sent([peer]) and not self._lent))

    def _advance(self, most: int) -> bool:
        moved = False
        if not self._posted:
            if not most:
                return False
            for flat, peers in self._give:
                self._box.post(self._channel, nbytes(flat), flat, peers, lend=self._lend)
            self._posted = True
            self.ahead = int(len(self._lent) < len(self._give))
        if not self._used and self._box.have(self._channel, self._totals):
            self._box.take(self._channel, self._totals, self._dtype, self._use)
            self._used = moved = True
        if self._used and self._box.sent(self.peers) and all(map(self._box.given, self._lent)):
            self.over, self.ahead = True, 0
            return True
        return moved
