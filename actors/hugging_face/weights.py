"""The weights of a folder: an actor reads only the byte ranges of its slices."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from itertools import accumulate, product
from pathlib import Path

import torch
from torch import Tensor

from raypar.actors.errors import CheckpointError
from raypar.actors.hugging_face.conversions import POSITIONS, WeightPart, adapters_converted, converted
from raypar.actors.hugging_face.folder import adapters_in, model_type_of, tensors_in
from raypar.actors.machine.files import AT_ONCE, checkpoint_errors
from raypar.actors.safetensors_header import ITEM, FileTensor
from raypar.actors.sharding import Shard

Span = tuple[int, int]  # first index along a dim, and the one after the last
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class FolderWeights:
    """Reads parts of the weights of a model or an adapter from a folder, with a few megabytes beside the result.

    Args:
        folder: The folder.
        adapts: Type of the model that the folder's adapters belong to; None for a folder with a model.

    Attributes:
        num_read: Bytes of weights that were read.

    Raises:
        CheckpointError: The folder holds no model of a known type, or no adapters.
    """

    def __init__(self, folder: Path, *, adapts: str | None = None) -> None:
        self._folder, self._type = folder, model_type_of(folder) if adapts is None else adapts
        self._kept = tensors_in(folder, self._type) if adapts is None else adapters_in(folder)[0]
        self._converted = converted if adapts is None else adapters_converted
        self.num_read = 0

    def fill(self, name: str, parameter: Tensor, shard: Shard) -> None:
        """Set the values of this actor's part of a weight, in place.

        Args:
            name: Logical name of the weight.
            parameter: Its part, in any dtype, contiguous.
            shard: Which part it is.

        Raises:
            CheckpointError: The folder has no such tensor, one of another shape, or can't be read.
        """
        spans = [shard.sharding[dim].spans(length) for dim, length in enumerate(shard.whole)]
        self.read(name, parameter, shard.whole, spans)

    def read(self, name: str, parameter: Tensor, whole: Sequence[int], spans: Sequence[Sequence[Span]]) -> None:
        """Set a tensor to some indices of a weight.

        Args:
            name: Logical name of the weight.
            parameter: The tensor, in any dtype, contiguous.
            whole: Shape of the weight.
            spans: For each dim, ranges of indices: the first one, and the one after the last.

        Raises:
            CheckpointError: As in ``fill``.
        """
        conversion = self._converted(self._type, [name]).get(name)
        kept = None if conversion is None else self._kept.get(conversion.theirs)
        if conversion is None or kept is None or not fits(conversion, kept, whole):
            raise CheckpointError([f"{str(self._folder)!r} has no weight {name!r} of shape {list(whole)}"])
        with (
            checkpoint_errors(f"{kept.file!r} can't be read"),
            (self._folder / kept.file).open("rb", buffering=0) as file,
        ):
            for region, piece in _regions(spans):
                target = parameter[region] if region else parameter
                if conversion.transposed:
                    target, piece = target.t(), piece[::-1]
                box, along = [*piece], 1 if conversion.transposed else 0
                if conversion.part:
                    start = conversion.part * whole[0]
                    box[along] = box[along][0] + start, box[along][1] + start
                self._read(file.fileno(), kept, box, target)
        if conversion.more:
            parameter.add_(conversion.more)

    def _read(self, file: int, kept: FileTensor, box: Sequence[Span], target: Tensor) -> None:
        """Read a box of a tensor into a target of its shape, some rows at a time."""
        item, (first, stop) = ITEM[kept.dtype], box[0] if box else (0, 1)
        row = item * math.prod(kept.shape[1:])  # bytes of a whole row: of all dims after the first
        low, high = box[1] if len(box) > 1 else (0, 1)
        each = row // (kept.shape[1] if len(box) > 1 else 1)
        wanted, is_whole = (high - low) * each, (high - low) * each == row
        at_once = max(1, AT_ONCE // max(1, wanted))
        for start in range(first, stop, at_once):
            count = min(at_once, stop - start)
            raw = torch.empty(count * wanted, dtype=torch.uint8)
            view, at = raw.numpy().data, kept.start + start * row + low * each
            if is_whole:
                self._fetch(file, kept, view, at)
            else:
                for number in range(count):
                    self._fetch(file, kept, view[number * wanted : (number + 1) * wanted], at + number * row)
            rows = target[start - first : start - first + count] if box else target
            rows.copy_(raw.view(DTYPES[kept.dtype]).view(rows.shape))

    def _fetch(self, file: int, kept: FileTensor, into: memoryview, at: int) -> None:
        """Read consecutive bytes of a file. Raises CheckpointError if it ends early."""
        while into:
            if not (got := os.preadv(file, [into], at)):
                raise CheckpointError([f"{kept.file!r} ends early: copy it again"])
            into, at, self.num_read = into[got:], at + got, self.num_read + got


def fits(conversion: WeightPart, kept: FileTensor, shape: Sequence[int]) -> bool:
    """Return whether a tensor in a file holds a weight of this shape, as the conversion says. Tables may be longer."""
    wanted = shape_in(conversion, shape)
    if kept.dtype not in ITEM or len(kept.shape) != len(wanted):
        return False
    longer = conversion.ours == POSITIONS
    return kept.shape[1:] == wanted[1:] and (kept.shape[:1] == wanted[:1] or (longer and kept.shape[0] > wanted[0]))


def shape_in(conversion: WeightPart, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the tensor of theirs for a weight of this shape."""
    wanted = (shape[0] * conversion.parts, *shape[1:])
    return wanted[::-1] if conversion.transposed else wanted


def _regions(spans: Sequence[Sequence[Span]]) -> Iterable[tuple[tuple[slice, ...], tuple[Span, ...]]]:
    """Yield the slices of each piece in the part, and its spans in the whole tensor."""
    placed = []
    for dim in spans:
        parts = zip(dim, accumulate(high - low for low, high in dim), strict=True)
        placed.append([(slice(stop - (high - low), stop), (low, high)) for (low, high), stop in parts])
    for pieces in product(*placed):
        yield tuple(region for region, _ in pieces), tuple(span for _, span in pieces)
