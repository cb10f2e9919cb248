"""Count the values of activations and gradients that a number format cannot hold, layer by layer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from raypar.actors.sharding import Shard, Sharding
from raypar.actors.specs.results import RangeCount, RangeKind
from raypar.actors.specs.types import Format
from raypar.actors.tensors import Values

DTYPES: dict[Format, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_PIECE = 1 << 20  # most elements that are counted together


@dataclass(eq=False)
class OverflowWatch:
    """Counts of one actor, in every k-th training step.

    A value overflows a format if it is infinite, NaN, or larger in magnitude than the format's largest number; it
    underflows if it is not zero and smaller than the format's smallest normal number. Counting changes no number of the
    run, and waits for no device before ``read``.

    Attributes:
        every: Count in every so many training steps, beginning with the first.
        format: The format.
        layers: Logical names of all layers of the model.
        outputs: This actor's part of the outputs of layers, by logical name; other outputs are whole.
        weights: This actor's part of each sharded parameter, by logical name; other parameters are whole.
        addends: By logical name, a key that distinguishes this actor's addend of a gradient from those of others.
    """

    every: int
    format: Format
    layers: Sequence[str]
    outputs: Mapping[str, Sharding]
    weights: Mapping[str, Sharding]
    addends: Mapping[str, Hashable]
    _parts: dict[tuple[int, int, int], tuple[Hashable, ...]] = field(default_factory=dict)  # see _output
    _layer_of: dict[str, tuple[int, tuple[Hashable, ...]]] = field(default_factory=dict)  # see _weight
    _is_on: bool = False
    _seen: set[tuple[int, int]] = field(default_factory=set)  # layer and microbatch whose outputs are counted
    _counts: list[RangeCount] = field(default_factory=list)  # without figures
    # Small tensors are counted together, so that they cost no more than large ones: magnitudes with their indices
    # in ``_counts``, by length, dtype and device.
    _waiting: dict[tuple[int, torch.dtype, torch.device], list[tuple[int, Tensor]]] = field(default_factory=dict)
    _held: int = 0  # elements in ``_waiting``
    _counted: list[tuple[Sequence[int], Tensor]] = field(default_factory=list)  # indices in ``_counts``, their figures

    def begin(self, step: int, *, train: bool) -> None:
        """Begin a step, and drop the state of an interrupted one."""
        self._is_on = train and step % self.every == 0
        self._seen.clear()
        self._counts.clear()
        self._waiting.clear()
        self._counted.clear()
        self._held = 0

    def watch(self, layer: int, microbatch: int, values: Values) -> None:
        """Count the outputs of a layer, and their gradients once the backward computes them.

        Recomputed outputs are not counted again, but watched for gradients.

        Args:
            layer: Index of the layer in the model.
            microbatch: Number of the microbatch in the whole step.
            values: The outputs.
        """
        if not self._is_on:
            return
        is_new = (layer, microbatch) not in self._seen
        self._seen.add((layer, microbatch))
        for number, value in enumerate(values):
            if not value.is_floating_point():
                continue
            part = self._output(layer, number, value.dim())
            if is_new:
                self._count(layer, "activations", microbatch, part, value)
            if value.requires_grad:
                value.register_hook(partial(self._count, layer, "gradients", microbatch, part))

    def weight_gradients(self, parameters: Mapping[str, Tensor], parts: Mapping[str, Shard]) -> None:
        """Count the gradients of parameters, summed over the replicas, before they are clipped.

        Args:
            parameters: Parameters by logical name; those without a gradient here are left out.
            parts: By logical name, the span that this actor has of the gradient of a parameter; it has all of others.
        """
        if not self._is_on:
            return
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                layer, part = self._weight(name)
                span = parts[name].elements if name in parts else None
                self._count(layer, "weight_gradients", None, (*part, span), parameter.grad)

    def read(self) -> tuple[RangeCount, ...]:
        """Return the counts of the step; () if it is not a step that counts."""
        if not self._counts:
            return ()
        self._count_waiting()
        sums = [[0, 0, 0] for _ in self._counts]
        device = self._counted[0][1].device  # offloaded tensors are counted on the host
        figures = torch.cat([figures.to(device) for _, figures in self._counted]).tolist()
        indices = (index for group, _ in self._counted for index in group)
        for index, row in zip(indices, figures, strict=True):
            sums[index] = [before + int(figure) for before, figure in zip(sums[index], row, strict=True)]
        self._counted.clear()
        read = tuple(
            each._replace(over=each.values - fit, under=small - zero)
            for each, (fit, small, zero) in zip(self._counts, sums, strict=True)
        )
        self._counts.clear()
        return read

    def _output(self, layer: int, number: int, dims: int) -> tuple[Hashable, ...]:
        """Return the key of this actor's part of an output of a layer."""
        key = layer, number, dims
        if key not in self._parts:
            sharding = self.outputs.get(self.layers[layer], Sharding()).for_dims(dims)
            self._parts[key] = (number, *_key_of(sharding))
        return self._parts[key]

    def _weight(self, name: str) -> tuple[int, tuple[Hashable, ...]]:
        """Return the index of a parameter's layer, and the key of this actor's part of its gradient."""
        if name not in self._layer_of:
            layer = max((each for each in self.layers if name.startswith(f"{each}.")), key=len)
            part = (name, *_key_of(self.weights.get(name, Sharding())), self.addends.get(name))
            self._layer_of[name] = self.layers.index(layer), part
        return self._layer_of[name]

    def _count(
        self, layer: int, kind: RangeKind, microbatch: int | None, part: tuple[Hashable, ...], value: Tensor
    ) -> None:
        """Copy the magnitudes of a tensor, which may be changed in place later, to count them with others."""
        flat = value.detach().flatten()
        for piece in (flat,) if flat.numel() <= _PIECE else flat.split(_PIECE):
            size = piece.abs() if piece.itemsize > 2 else piece.float().abs_()  # halves cannot hold the counts
            self._waiting.setdefault((size.numel(), size.dtype, size.device), []).append((len(self._counts), size))
        self._counts.append(RangeCount(layer, self.layers[layer], kind, microbatch, part, value.numel(), 0, 0))
        self._held += value.numel()
        if self._held >= _PIECE:
            self._count_waiting()

    def _count_waiting(self) -> None:
        info = torch.finfo(DTYPES[self.format])
        for waiting in self._waiting.values():
            indices, sizes = zip(*waiting, strict=True)
            stacked = sizes[0].unsqueeze(0) if len(sizes) == 1 else torch.stack(sizes)
            self._counted.append((indices, count_sizes(stacked, info.max, info.smallest_normal)))
        self._waiting.clear()
        self._held = 0


def count_sizes(sizes: Tensor, largest: float, smallest: float) -> Tensor:
    """Count magnitudes, row by row.

    Comparisons write 0 and 1 in the tensor's dtype, because torch vectorizes that on CPUs and not comparisons to bool:
    0.6 ns an element instead of 1.9.

    Args:
        sizes: (n, k) magnitudes in fp32 or fp64, with k at most 2**24. They are overwritten.
        largest: The largest magnitude that fits.
        smallest: The smallest magnitude that is normal.

    Returns:
        (n, 3): for each row, the number of elements that are at most ``largest`` (NaN is not), of those below
        ``smallest``, and of zeros.
    """
    truth = torch.empty_like(sizes)
    fits = torch.le(sizes, largest, out=truth).sum(1)
    zeros = torch.eq(sizes, 0.0, out=truth).sum(1)
    return torch.stack([fits, sizes.lt_(smallest).sum(1), zeros], 1)


def _key_of(sharding: Sharding) -> tuple[Hashable, ...]:
    """Return a sharding as a key, the same on all actors that hold the same part."""
    return tuple((dim, pieces.count, pieces.own) for dim, pieces in sorted(sharding.dims.items()))
