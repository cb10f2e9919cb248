"""The exchange of matrices that several actors divide: each is whole at one of them for a while, which computes it.

A matrix is divided twice: a tensor group cuts it into slices, and replicas cut each slice into spans. The actors of
both groups share the matrices out (``matrix_rounds``). In a round the spans of a slice meet at one replica, on every
tensor rank, and then the slices of that replica at one tensor rank. The results go back in the same way. While an actor
computes a matrix, the spans of the next round are on their way to it, and the results of the last one from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raypar.actors.collective.group import Group
from raypar.actors.optim.muon.matrix_rounds import Round, matrix_rounds
from raypar.actors.optim.muon.part_exchange import gather_parts, scatter_parts
from raypar.actors.sharding import Shape, Shard, Span
from raypar.actors.tensor_parallel.gradients import ShardedGradients
from raypar.actors.tensors import empty_in

Tables = tuple[list[list[list[int]]], list[list[int]]]  # see ``MatrixExchange._table``
Parts = Callable[[], dict[str, Tensor]]  # waits, and returns tensors by logical name


@dataclass(frozen=True)
class CutMatrices:
    """How replicas divide the elements of parameters, among them matrices.

    Attributes:
        group: The replicas.
        shapes: The shape of each parameter as the actor's tensor group leaves it, by logical name, in one order on all
            actors.
        spans: The span of each replica that holds a part of it, by its rank.
    """

    group: Group
    shapes: Mapping[str, Shape]
    spans: Mapping[str, Mapping[int, Span]]


@dataclass(frozen=True)
class DividedMatrices:
    """How actors divide the parameters of an optimizer.

    Attributes:
        tensors: The parameters that a tensor-parallel group shards.
        cuts: The parameters that replicas cut; others are whole on the replica that updates them.
    """

    tensors: ShardedGradients
    cuts: Sequence[CutMatrices] = ()

    def exchanges(
        self, own: Mapping[str, Shape], parts: Mapping[str, Shard], is_matrix: Callable[[str, Shape], bool]
    ) -> list[MatrixExchange]:
        """Return the exchanges of all matrices that this actor holds, or whose replicas it is one of.

        Args:
            own: The shapes of the parameters that this actor updates, in whole or in part, by logical name.
            parts: The spans of those that it updates in part.
            is_matrix: Returns whether a parameter of this name and shape is such a matrix.
        """
        cut = {name for one in self.cuts for name in one.shapes}
        kinds: list[tuple[Mapping[str, Shape], CutMatrices | None]]
        kinds = [({name: shape for name, shape in own.items() if name not in cut}, None)]
        kinds += [(one.shapes, one) for one in self.cuts]
        found = []
        for shapes, cuts in kinds:
            matrices = {name: shape for name, shape in shapes.items() if is_matrix(name, shape)}
            for alone in (False, True):
                mine = {name: one for name, one in matrices.items() if (name in self.tensors.private) == alone}
                if mine:
                    found.append(MatrixExchange(mine, parts, self.tensors, None if alone else self.tensors.group, cuts))
        return found


@dataclass(eq=False)
class MatrixExchange:
    """Makes matrices whole, each at one of the actors that divide it, and divides the results.

    Attributes:
        slices: The shape of this actor's slice of each matrix, by logical name, in one order on all actors.
        parts: The spans of these that this actor holds, by logical name.
        sharded: The slices that a tensor-parallel group leaves to this actor.
        tensors: That group; None if there is none.
        cuts: How replicas cut the slices; None if this actor holds them whole.
    """

    slices: Mapping[str, Shape]
    parts: Mapping[str, Shard]
    sharded: ShardedGradients
    tensors: Group | None
    cuts: CutMatrices | None

    def __post_init__(self) -> None:
        self._replicas = None if self.cuts is None else self.cuts.group
        self._numbers = {name: number for number, name in enumerate(self.slices)}
        self._rounds: list[Round] | None = None
        self._tables: Tables | None = None

    def whole(self, name: str) -> Shape:
        """Return the rows and columns of a matrix."""
        shard = self._shard(name)
        return self.slices[name] if shard is None else shard.whole

    def results(
        self,
        names: Collection[str],
        part: Callable[[str], Tensor],
        result: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield this actor's part of the result of each matrix. All actors call it.

        Args:
            names: The matrices to compute of which this actor holds a part, in the order of ``slices``.
            part: Returns this actor's part of a matrix: its span (elements,), or its slice.
            result: Computes the result of a whole matrix (rows, columns), of the same shape and in ``dtype``.
            dtype: The dtype in which parts are exchanged.

        Returns:
            An iterator of (logical name, this actor's part), which has the shape of ``part``'s.
        """
        self._dtype, present = dtype, {*names}
        rounds = [{name: one for name, one in each.items() if name in present} for each in self._planned(names)]
        if not rounds:
            return
        wholes: Parts = self._join(rounds[0], part)
        leaving: Parts = dict
        for number, each in enumerate(rounds):
            matrices = wholes()
            if number + 1 < len(rounds):
                wholes = self._join(rounds[number + 1], part)
            computed = {name: result(matrices.pop(name)) for name in list(matrices)}
            yield from leaving().items()
            leaving = self._divide(each, computed)
        yield from leaving().items()

    def _planned(self, names: Collection[str]) -> list[Round]:
        """Return the rounds of matrices.

        Of a matrix that replicas cut, those without a part of it do not know whether it has a gradient: so the rounds
        are those of all.
        """
        if self._replicas is None:
            size = 1 if self.tensors is None else self.tensors.size
            return matrix_rounds({name: self.whole(name) for name in names}, dict.fromkeys(names, range(size)))
        if self._rounds is None:
            tensors = 1 if self.tensors is None else self.tensors.size
            _, held = self._table()
            holders = {
                name: [t * self._replicas.size + r for t in range(tensors) for r, one in enumerate(held[number]) if one]
                for name, number in self._numbers.items()
            }
            self._rounds = matrix_rounds({name: self.whole(name) for name in self.slices}, holders)
        return self._rounds

    def _join(self, each: Round, part: Callable[[str], Tensor]) -> Parts:
        """Start to make the matrices of a round whole.

        Returns:
            A function that waits, and returns the matrices of the round that this actor computes.
        """
        parts = {name: part(name).to(self.sharded.device) for name in each}
        if self.cuts is None:
            return self._join_slices(each, parts)
        spans, roots = self.cuts.spans, self._replica_roots(each)
        wait = gather_parts(self.cuts.group, roots, self._span_count, parts, self._dtype)

        def slices() -> dict[str, Tensor]:
            joined = dict[str, Tensor]()
            for name, pieces in wait().items():
                joined[name], flat = self._empty_slice(name)
                for rank, (start, stop) in spans[name].items():
                    flat[start:stop] = pieces[rank]
            return self._join_slices(each, joined)()

        return slices

    def _join_slices(self, each: Round, slices: dict[str, Tensor]) -> Parts:
        """Start to make matrices whole whose slices the members of a tensor group have."""
        group = self.tensors
        if group is None:
            return lambda: slices
        boxes, roots = self._table()[0], self._tensor_roots(slices, each)

        def count(name: str, rank: int) -> int:
            rows, end_row, columns, end_column, sends = boxes[rank][self._numbers[name]]
            return (end_row - rows) * (end_column - columns) * sends

        sent = {name: one if count(name, group.rank) else one[:0] for name, one in slices.items()}
        wait = gather_parts(group, roots, count, sent, self._dtype)

        def wholes() -> dict[str, Tensor]:
            joined = dict[str, Tensor]()
            for name, pieces in wait().items():
                if self._shard(name) is None:
                    joined[name] = slices[name]
                    continue
                joined[name] = pieces[0].new_empty(self.whole(name))
                for rank, piece in enumerate(pieces):
                    if piece.numel():
                        inside = self._box(joined[name], rank, name)
                        inside.copy_(piece.view(inside.shape))
            return joined

        return wholes

    def _divide(self, each: Round, results: dict[str, Tensor]) -> Parts:
        """Start to divide the results of a round; the function that it returns waits for this actor's parts."""
        slices = self._divide_slices(each, results)
        if self.cuts is None:
            return slices
        spans, pieces = self.cuts.spans, dict[str, list[Tensor]]()
        for name, one in slices().items():
            flat = one.permute(self._order(name)).reshape(-1)
            pieces[name] = [flat[slice(*spans[name].get(rank, (0, 0)))] for rank in range(self.cuts.group.size)]
        return scatter_parts(self.cuts.group, self._replica_roots(each), self._span_count, pieces, self._dtype)

    def _divide_slices(self, each: Round, results: dict[str, Tensor]) -> Parts:
        """Start to send results in slices to the members of a tensor group, those of the replica of a matrix."""
        group = self.tensors
        if group is None:
            return lambda: results
        boxes = self._table()[0]
        here = [name for name in each if self._replicas is None or self._is_root(name, each)]
        roots = self._tensor_roots(here, each)

        def count(name: str, rank: int) -> int:
            rows, end_row, columns, end_column, _ = boxes[rank][self._numbers[name]]
            return (end_row - rows) * (end_column - columns)

        pieces = {name: [self._box(one, rank, name) for rank in range(group.size)] for name, one in results.items()}
        wait = scatter_parts(group, roots, count, pieces, self._dtype)
        return lambda: {name: one.view(self.slices[name]) for name, one in wait().items()}

    def _replica_roots(self, each: Round) -> dict[str, int]:
        assert self._replicas is not None
        return {name: member % self._replicas.size for name, member in each.items()}

    def _tensor_roots(self, names: Collection[str], each: Round) -> dict[str, int]:
        replicas = 1 if self._replicas is None else self._replicas.size
        return {name: member // replicas for name, member in each.items() if name in names}

    def _is_root(self, name: str, each: Round) -> bool:
        """Return whether the slices of a matrix meet at this replica."""
        return self._replicas is not None and each[name] % self._replicas.size == self._replicas.rank

    def _span_count(self, name: str, rank: int) -> int:
        assert self.cuts is not None
        start, stop = self.cuts.spans[name].get(rank, (0, 0))
        return stop - start

    def _order(self, name: str) -> tuple[int, ...]:
        """Return the memory order of the dims of a slice that replicas cut."""
        return self.parts[name].order or (0, 1)

    def _empty_slice(self, name: str) -> tuple[Tensor, Tensor]:
        """Return a new slice, and the view of its elements in memory order."""
        order = self._order(name)
        made = empty_in(self.slices[name], order, self._dtype, self.sharded.device)
        return made, made.permute(order).view(-1)

    def _shard(self, name: str) -> Shard | None:
        return None if self.tensors is None else self.sharded.shards.get(name)

    def _box(self, whole: Tensor, rank: int, name: str) -> Tensor:
        """Return the view of a tensor rank's slice of a whole matrix."""
        assert self._tables is not None
        rows, end_row, columns, end_column, _ = self._tables[0][rank][self._numbers[name]]
        return whole[rows:end_row, columns:end_column]

    def _table(self) -> Tables:
        """Return how the other actors hold matrices; the members of a tensor group exchange it once.

        Returns:
            By tensor rank and number of the matrix, the first row of its slice and the one after the last, the same of
            columns, and 1 if this member sends its slice, as another does not have the same; and by number of the
            matrix and replica, 1 if the replica holds a part of the slice of every tensor rank.
        """
        if self._tables is None:
            own = torch.tensor([self._row(name) for name in self.slices])
            size = 0 if self.cuts is None else self.cuts.group.size
            spans = {} if self.cuts is None else self.cuts.spans
            held = torch.tensor([[rank in spans[name] for rank in range(size)] for name in self.slices]).long()
            boxes = own[None]
            if self.tensors is not None:
                boxes = own.new_empty(self.tensors.size, *own.shape)
                self.tensors.host.all_gather(boxes, own).wait()
                if size:
                    self.tensors.host.all_reduce(held, "min").wait()
            self._tables = boxes.tolist(), held.tolist()
        return self._tables

    def _row(self, name: str) -> list[int]:
        shard = self._shard(name)
        sends = shard is not None and self.sharded.counts(name)
        box = Shard(self.slices[name]) if shard is None else shard
        return [*box.span(0), *box.span(1), int(sends)]
