"""The row of a rank of a V, which holds the stages s and 2p - 1 - s, generated action by action."""

from __future__ import annotations

from collections import deque
from itertools import product

from raypar.schedules.action import Action, Op


class VSteps:
    """Adds the next microbatch of a stage to a row, while microbatches are left.

    Attributes:
        row: The row so far.
    """

    def __init__(self, rank: int, num_ranks: int, num_microbatches: int) -> None:
        self.row: list[Action] = []
        self._stages, self._most = (rank, 2 * num_ranks - 1 - rank), num_microbatches
        self._next = dict.fromkeys(product((0, 1), (Op.F, Op.I, Op.W)), 0)
        self._postponed = deque[int]()  # chunks whose I was added by ``add_input``, and whose W was not

    def add(self, chunk: int, *ops: Op) -> None:
        """Add actions of the stage that goes down the V (0) or of the one that comes back up (1)."""
        for op in ops:
            counted = (Op.I, Op.W) if op is Op.B else (op,)
            if (microbatch := self._next[chunk, counted[0]]) < self._most:
                self.row.append(Action(self._stages[chunk], op, microbatch))
                for one in counted:
                    self._next[chunk, one] += 1

    def add_input(self, chunk: int) -> None:
        """Add an I, whose W ``add_weight`` adds later."""
        self.add(chunk, Op.I)
        self._postponed.append(chunk)

    def add_weight(self) -> None:
        """Add the oldest postponed W, if there is one."""
        if self._postponed:
            self.add(self._postponed.popleft(), Op.W)

    def left(self, chunk: int, op: Op) -> int:
        """Return the number of microbatches left for an op of a chunk."""
        return self._most - self._next[chunk, op]
