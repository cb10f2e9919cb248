"""The CPU group of members on several nodes, some of which share a node: large tensors cross the network once a node.

An all_reduce of a large tensor goes piece by piece through three steps: the members of a node reduce to the first of
them through shared memory; these leaders reduce over Gloo; and each passes the result on to its node. The network works
on one piece while shared memory works on the next.

Order of additions: inside a node by rank, then the nodes' sums in the order of Gloo's ring of leaders. It depends on
which members share a node, and on nothing else.

An all_gather_cut of a large tensor takes each part to one member of every other node, and these fill the tensors of
the others there through shared memory. A reduce_scatter_cut adds in rank order whatever the nodes are, so all members
exchange their parts. Smaller tensors and all other ops are Gloo's among all members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import PrefixStore, Store

from raypar.actors.collective.flat_cut import FlatCut
from raypar.actors.collective.gloo.group import NEVER, GlooGroup
from raypar.actors.collective.group import Finish, GroupMember
from raypar.actors.collective.reductions import ReduceOp
from raypar.actors.collective.shm.group import ShmGroup
from raypar.actors.collective.shm.links import PeerConnection
from raypar.actors.tensors import nbytes

LARGE = 1 << 18  # bytes from which an all_reduce goes node by node
_PIECE = 4 << 20  # bytes of a piece
_STEPS, _ACROSS = 3, 1


class HierarchicalGroup(GlooGroup):
    """A group over several nodes. See ``GlooGroup`` for the other arguments.

    Args:
        nodes: The ranks of each node, each in ascending order, ordered by their first.
        connect_node: Connects this member to the others of its node, given their ranks and a timeout in seconds;
            returns a link per other member, by its index among them.
    """

    def __init__(
        self,
        member: GroupMember,
        store: Store,
        device: Any,
        *,
        nodes: Sequence[Sequence[int]],
        connect_node: Callable[[Sequence[int], float], dict[int, PeerConnection]],
    ) -> None:
        self._node: ShmGroup | None = None
        self._leaders: GlooGroup | None = None
        super().__init__(member, PrefixStore("flat", store), device)
        self._num_nodes = len(nodes)
        own = next(index for index, ranks in enumerate(nodes) if member.rank in ranks)
        self._among, self._elsewhere = nodes[own], [*nodes[:own], *nodes[own + 1 :]]
        self._node_cuts = dict[FlatCut, FlatCut]()
        among = self._among
        if len(among) > 1:
            on_node = replace(member, rank=among.index(member.rank), size=len(among), ledger=None)
            self._node = ShmGroup(on_node, partial(connect_node, among))
        if among[0] == member.rank:
            of_node = replace(member, rank=own, size=len(nodes), ledger=None)
            self._leaders = GlooGroup(of_node, PrefixStore("leaders", store), device)

    def abort(self) -> None:
        super().abort()
        for part in (self._node, self._leaders):
            if part is not None:
                part.abort()

    def _is_large(self, tensor: Tensor) -> bool:
        return nbytes(tensor) >= LARGE

    def _all_reduce_bytes(self, tensor: Tensor) -> int:
        """Return the bytes that this member sends: its tensor to its leader; a leader, a ring's and the result."""
        if not self._is_large(tensor):
            return super()._all_reduce_bytes(tensor)
        if self._leaders is None:
            return nbytes(tensor)
        others = 0 if self._node is None else self._node.size - 1
        return 2 * (self._num_nodes - 1) * nbytes(tensor) // self._num_nodes + others * nbytes(tensor)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Finish:
        if not self._is_large(tensor):
            return super()._all_reduce(tensor, op)
        pieces = tensor.view(-1).split(_PIECE // tensor.element_size())
        return self._on_thread(lambda: self._reduce_pieces(pieces, op))

    def _all_gather_cut(self, flat: Tensor, part: Tensor | None, cut: FlatCut) -> Finish:
        if not self._is_large(flat):
            return super()._all_gather_cut(flat, part, cut)
        index = self._among.index(self.rank)
        to = [ranks[index % len(ranks)] for ranks in self._elsewhere]
        across = self._gather_cut(flat, part, cut, to, self._taken(index))

        def share() -> None:
            across(NEVER)
            if self._node is not None:
                self._node._all_gather_cut(flat, None, self._node_cut(cut))(NEVER)

        return self._on_thread(share)

    def _taken(self, index: int) -> list[int]:
        """Return the ranks of other nodes whose parts a member of this node takes, given its index here."""
        return [rank for ranks in self._elsewhere for rank in ranks[index :: len(self._among)]]

    def _node_cut(self, cut: FlatCut) -> FlatCut:
        """Return what each member of this node has of a tensor once its part has come, and those that it takes."""
        if cut not in self._node_cuts:
            have = [[rank, *self._taken(index)] for index, rank in enumerate(self._among)]
            spans = (tuple(sorted(span for rank in ranks for span in cut.spans[rank])) for ranks in have)
            self._node_cuts[cut] = FlatCut(tuple(spans))
        return self._node_cuts[cut]

    def _reduce_pieces(self, pieces: Sequence[Tensor], op: ReduceOp) -> None:
        """Take all pieces through the steps, each of which is started for a piece when the one before is complete."""
        under_way: dict[int, Finish] = {}
        for beat in range(len(pieces) + _STEPS):
            for step in range(_STEPS + 1):
                at = beat - step
                if 0 <= at < len(pieces):
                    if step:
                        under_way.pop(at)(NEVER)
                    if step < _STEPS:
                        under_way[at] = self._started(step, pieces[at], op)

    def _started(self, step: int, piece: Tensor, op: ReduceOp) -> Finish:
        """Start a step for a piece: every member of a node starts the same ops in the same order."""
        if step == _ACROSS:
            return _done if self._leaders is None else self._leaders._all_reduce(piece, op)
        if self._node is None:
            return _done
        return self._node._broadcast(piece, 0) if step else self._node._reduce(piece, 0, op)


def _done(timeout: float) -> None:
    """Return at once: the Finish of a step in which this member does not take part."""
