"""The norm of gradients: norms of blocks of elements, and the exact sum of their squares.

A tensor is cut over actors between blocks only (``block_of``), and a block's norm does not depend on what else an actor
holds. The sum has no rounding, so it has no order. Hence the norm has the same bits for any cut of the model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raypar.actors.autograd.torch_private import copy_each
from raypar.actors.portions import portions
from raypar.actors.sharding import NORM_SCRATCH, SMALL, block_of
from raypar.actors.tensors import dense_strides

_FRACTION, _MOST = 23, 255  # bits of the fraction of an fp32 number, and its exponent if it is not finite
_SMALLEST = -149  # the smallest fp32 number is 2**-149
_HALF = 24  # a mantissa's square has 48 bits; sums of its halves are exact in fp64 up to 2**29 addends
_LIMB, _NUM_LIMBS = 32, 19  # limbs of a sum in a message: for 2**48 * 2**506 and 2**54 addends
_SCRATCH = 4 << 20  # bytes of small gradients that are measured at a time on a CPU


@dataclass(frozen=True)
class ExactSum:
    """A sum of squares of fp32 numbers without rounding.

    Attributes:
        units: The sum of the squares of the finite numbers, in units of the square of the smallest fp32 number.
        infinities: Number of infinite addends.
        nans: Number of addends that are not a number.
    """

    units: int = 0
    infinities: int = 0
    nans: int = 0

    @classmethod
    def of(cls, numbers: Tensor) -> ExactSum:
        """Add the squares of numbers (n,) float32 on the host, at most 2**29."""
        bits = numbers.numpy().view(np.uint32)
        exponents, fractions = (bits >> _FRACTION) & _MOST, bits & ((1 << _FRACTION) - 1)
        infinities = nans = 0
        if not (finite := exponents < _MOST).all():
            nans = int(np.count_nonzero(fractions[~finite]))
            infinities = int(np.count_nonzero(~finite)) - nans
            exponents, fractions = exponents[finite], fractions[finite]
        mantissas = fractions | ((exponents > 0).astype(np.uint32) << _FRACTION)
        squares, powers = np.square(mantissas, dtype=np.int64), np.maximum(exponents, 1) - 1
        units = 0
        for part, shift in ((squares & ((1 << _HALF) - 1), 0), (squares >> _HALF, _HALF)):
            sums = np.bincount(powers, part)  # float64
            units += sum(int(sums[power]) << (2 * int(power) + shift) for power in np.flatnonzero(sums))
        return cls(units, infinities, nans)

    @classmethod
    def read(cls, numbers: Sequence[float]) -> ExactSum:
        """Return the sum from the result of ``numbers``, or the sum of several from the sum of their results."""
        *limbs, infinities, nans = map(int, numbers)
        return cls(sum(limb << (_LIMB * index) for index, limb in enumerate(limbs)), infinities, nans)

    def numbers(self) -> list[int]:
        """Return 21 integers that express the sum. In fp64 those of 2**21 actors are added without rounding."""
        limbs = [(self.units >> (_LIMB * index)) & ((1 << _LIMB) - 1) for index in range(_NUM_LIMBS)]
        return [*limbs, self.infinities, self.nans]

    def __add__(self, other: ExactSum) -> ExactSum:
        return ExactSum(self.units + other.units, self.infinities + other.infinities, self.nans + other.nans)

    @property
    def is_finite(self) -> bool:
        """Whether all addends are finite."""
        return not self.infinities and not self.nans

    def without_units(self) -> ExactSum:
        """Return the sum of the addends that are not finite."""
        return ExactSum(0, self.infinities, self.nans)

    def root(self) -> Tensor:
        """Return the square root of the sum: () float32."""
        if not self.is_finite:
            return torch.tensor(math.nan if self.nans else math.inf)
        return torch.tensor(math.ldexp(math.sqrt(self.units), _SMALLEST), dtype=torch.float64).float()


class BlockNorms:
    """The norms of the blocks of some gradients.

    Args:
        values: The norms (n,) float32 of all blocks, on the host.
        rows: The positions of each parameter's norms in it, by logical name.
    """

    def __init__(self, values: Tensor, rows: Mapping[str, Sequence[slice]]) -> None:
        self._values, self._rows = values, rows

    @classmethod
    def joined(cls, parts: Iterable[BlockNorms]) -> BlockNorms:
        """Return the norms of several sets of gradients."""
        first, *others = [*parts] or [cls(torch.zeros(0), {})]
        values, rows, start = [first._values], dict(first._rows), len(first._values)
        for part in others:
            values.append(part._values)
            for name, own in part._rows.items():
                rows[name] = [slice(one.start + start, one.stop + start) for one in own]
            start += len(part._values)
        return cls(torch.cat(values), rows) if others else first

    @property
    def names(self) -> list[str]:
        """The logical names of the parameters with a gradient."""
        return list(self._rows)

    def squares(self, names: Collection[str]) -> ExactSum:
        """Return the sum of the squares of the elements of some parameters' gradients.

        Args:
            names: Their logical names.
        """
        if len(names) == len(self._rows):
            return ExactSum.of(self._values)
        chosen = [self._values[rows] for name in names for rows in self._rows[name]]
        return ExactSum.of(torch.cat(chosen)) if chosen else ExactSum()

    def of(self, name: str) -> Tensor:
        """Return the norms (n,) of the blocks of a parameter's gradient."""
        return torch.cat([self._values[rows] for rows in self._rows[name]]) if self._rows[name] else torch.zeros(0)


class _Piece(NamedTuple):
    """Elements of a parameter's gradient that are copied before they are measured.

    Attributes:
        name: Logical name of the parameter.
        start: The first element of the piece, in memory order.
        elements: Number of elements, as real numbers.
        block: Elements of a block.
        dtype: Dtype in which their norms are computed.
        is_whole: Whether it is the whole gradient.
    """

    name: str
    start: int
    elements: int
    block: int
    dtype: torch.dtype
    is_whole: bool

    @property
    def num_rows(self) -> int:
        return -(-self.elements // self.block)


class _Portion(NamedTuple):
    """Pieces that are measured together.

    Attributes:
        rows: Memory (n, block) for their blocks; what no piece fills is zero.
        pieces: The pieces.
        targets: For each piece the part of ``rows`` that it is copied into, with the shape of the gradient or (n,).
        is_overwritten: Whether the memory has other values by the next step: of other portions, or of the measuring.
    """

    rows: Tensor
    pieces: Sequence[_Piece]
    targets: list[Tensor]
    is_overwritten: bool


class GradientBlocks:
    """Measures the blocks of gradients with few ops.

    Gradients are copied side by side into memory that is kept, for each size of block. On a CPU it has at most 4 MiB,
    and gradients of 65,536 elements and more are measured where they are, with one op each, which takes less time than
    a copy. On a GPU it has at most 128 MiB, and no gradient costs a launch of its own. The blocks lie in the memory
    order of the parameter. A short last block is measured as if zeros filled it.

    Args:
        parameters: The parameters by logical name, whole or spans of whole blocks.
        elements: By logical name, the number of elements of the tensor that a parameter is a span of; others are whole.
    """

    def __init__(self, parameters: Mapping[str, Tensor], elements: Mapping[str, int] | None = None) -> None:
        self._parameters, self._elements = parameters, elements or {}
        self._names: tuple[str, ...] | None = None  # the parameters that everything below is for
        self._portions: list[_Portion] = []
        self._large: list[str] = []
        self._rows: dict[str, list[slice]] = {}
        self._strides: dict[str, tuple[int, ...]] = {}

    @torch.no_grad()
    def norms(self, gradients: Mapping[str, Tensor]) -> BlockNorms:
        """Measure gradients.

        Args:
            gradients: The gradients of some parameters, by logical name, on their device.
        """
        if self._names != tuple(gradients):
            self._lay_out(tuple(gradients))
        values = []
        for rows, pieces, targets, is_overwritten in self._portions:
            if is_overwritten:
                rows.zero_()
            copy_each(targets, [self._source(piece, gradients[piece.name]) for piece in pieces])
            values.append(_row_norms(rows))
        for name in self._large:
            gradient, block = self._in_order(name, gradients[name]), self._block(name)
            values.append(_row_norms(gradient.as_strided((gradient.numel() // block, block), (block, 1))))
        joined = torch.cat(values) if len(values) > 1 else (*values, torch.zeros(0))[0]
        return BlockNorms(joined.cpu(), self._rows)

    def _lay_out(self, names: tuple[str, ...]) -> None:
        """Divide the memory for small gradients among the parameters of these names."""
        self._names, self._portions, self._large = names, [], []
        self._rows = {name: [] for name in names}
        self._strides = {name: dense_strides(self._parameters[name]) for name in names}
        alike = dict[tuple[int, torch.dtype], list[_Piece]]()
        for piece in self._pieces(names):
            alike.setdefault((piece.block, piece.dtype), []).append(piece)
        start = 0
        for (block, dtype), pieces in alike.items():
            device = self._parameters[pieces[0].name].device
            together = list(portions(pieces, lambda piece: piece.num_rows, _rows_at_a_time(block, dtype, device)))
            counts = [sum(piece.num_rows for piece in portion) for portion in together]
            memory = torch.zeros(max(counts), block, dtype=dtype, device=device)
            for portion, count in zip(together, counts, strict=True):
                targets = list(self._targets(portion, memory))
                is_overwritten = len(together) > 1 or device.type != "cpu"
                self._portions.append(_Portion(memory[:count], portion, targets, is_overwritten))
                for piece in portion:
                    self._rows[piece.name].append(slice(start, start + piece.num_rows))
                    start += piece.num_rows
        for name in self._large:
            count = self._parameters[name].numel() // self._block(name)
            self._rows[name].insert(0, slice(start, start + count))
            start += count

    def _pieces(self, names: Iterable[str]) -> Iterator[_Piece]:
        """Yield the pieces of gradients to copy, and note those that are measured where they are, but for their end."""
        for name in names:
            parameter, block = self._parameters[name], self._block(name)
            elements, start = parameter.numel() * (1 + parameter.is_complex()), 0
            is_double = parameter.dtype in (torch.float64, torch.complex128)
            dtype = torch.float64 if is_double else torch.float32
            if elements < SMALL or parameter.is_complex():
                if elements:
                    yield _Piece(name, 0, elements, block, dtype, is_whole=True)
                continue
            if parameter.device.type == "cpu":
                self._large.append(name)
                start = elements // block * block
            most = block * _rows_at_a_time(block, dtype, parameter.device)
            for first in range(start, elements, most):
                yield _Piece(name, first, min(most, elements - first), block, dtype, is_whole=False)

    def _targets(self, pieces: Iterable[_Piece], memory: Tensor) -> Iterator[Tensor]:
        """Yield the part of the memory (n, block) of each piece."""
        flat, row = memory.flatten(), 0
        for piece in pieces:
            target = flat.narrow(0, row * piece.block, piece.elements)
            row += piece.num_rows
            if not piece.is_whole:
                yield target
                continue
            parameter = self._parameters[piece.name]
            if parameter.is_complex():
                target = target.view(torch.complex128 if piece.dtype == torch.float64 else torch.complex64)
            yield target.as_strided(parameter.shape, self._strides[piece.name])

    def _source(self, piece: _Piece, gradient: Tensor) -> Tensor:
        if piece.is_whole:
            return gradient
        gradient = self._in_order(piece.name, gradient)
        return gradient.as_strided((piece.elements,), (1,), gradient.storage_offset() + piece.start)

    def _in_order(self, name: str, gradient: Tensor) -> Tensor:
        """Return a gradient that is dense in the memory order of its parameter: a copy if it is not."""
        strides = self._strides[name]
        dims = zip(gradient.shape, gradient.stride(), strides, strict=True)
        if all(length == 1 or own == wanted for length, own, wanted in dims):
            return gradient
        copy = torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device)
        return copy.copy_(gradient)

    def _block(self, name: str) -> int:
        return block_of(self._elements.get(name, self._parameters[name].numel()))


def global_norm(gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the norm of all gradients of a plain process, with the bits of any layout without tensor parallelism.

    Args:
        gradients: The gradients by logical name.
        parameters: Their parameters, and perhaps others, by logical name.

    Returns:
        () float32 on the host.
    """
    return GradientBlocks(parameters).norms(gradients).squares(gradients).root()


def _rows_at_a_time(block: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the number of blocks of gradients that are copied and measured at a time."""
    num_bytes = _SCRATCH if device.type == "cpu" else NORM_SCRATCH
    return max(1, num_bytes // dtype.itemsize // block)


def _row_norms(rows: Tensor) -> Tensor:
    """Return the 2-norms (n,) float32 of rows (n, block). On a GPU it overwrites the rows.

    They have the same bits for each row whatever the other rows are. Kernels of GPUs do not promise that for a sum over
    a dim, so there halves are added element by element.
    """
    if rows.device.type == "cpu":
        is_half = rows.dtype in (torch.bfloat16, torch.float16)
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32 if is_half else None)
        return norms.float()
    rows.square_()
    width = rows.shape[1]
    while width > 1:
        width //= 2
        rows[:, :width].add_(rows[:, width : 2 * width])
    return rows[:, 0].sqrt().float()
