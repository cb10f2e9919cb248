"""The sums of gradients that an actor gets: where they are kept from their reduction to the update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from raypar.actors.collective.group import Waitable
from raypar.actors.data_parallel.buckets import Bucket
from raypar.actors.offload_storage import OffloadStorage
from raypar.actors.tensors import nbytes


class GradientSums:
    """The sums of gradients over the replicas, and over the rounds of a step, that an actor gets.

    On the device a sum stays in the flat tensor in which it arrives, and becomes the gradient of the layers'
    parameters. A home apart has memory for it, and it becomes the gradient of the masters, in their dtype.

    Args:
        buckets: All buckets.
        here: The numbers of those whose sums this actor gets.
        home: Where it keeps them.
        masters: The weights that it updates, by logical name.

    Attributes:
        is_apart: Whether the sums are kept away from the device.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        here: Collection[int],
        home: OffloadStorage,
        masters: Mapping[str, nn.Parameter],
    ) -> None:
        self.is_apart = home.is_apart
        self._buckets, self._home, self._masters = buckets, home, masters
        self._sums: dict[int, Tensor] = {}  # by bucket
        self._rooms: dict[int, Tensor] = {}  # by bucket, memory apart
        self._in_dtype: dict[str, Tensor] = {}  # by name, memory for gradients in another dtype
        for number in here if home.is_apart else ():
            bucket = buckets[number]
            self._rooms[number] = home.empty(bucket.size, bucket.grad_dtype)
            for name in bucket.parameters:
                if masters[name].dtype != bucket.grad_dtype:
                    self._in_dtype[name] = home.like(masters[name], masters[name].dtype)

    def __contains__(self, number: int) -> bool:
        return number in self._sums

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradients that are kept now: on the device those so far, apart the memory for all."""
        if self.is_apart:
            return sum(map(nbytes, (*self._rooms.values(), *self._in_dtype.values())))
        return sum(self._buckets[number].num_bytes for number in self._sums)

    def begin(self) -> None:
        """Drop all sums, at the beginning of a step."""
        self._sums.clear()

    @torch.no_grad()
    def add(self, number: int, flat: Tensor) -> None:
        """Add what a round has summed up.

        Args:
            number: Number of the bucket.
            flat: Its flat tensor, (size,).
        """
        kept = self._sums.get(number)
        if kept is not None:
            with self._home.at_hand([kept], writes=True):
                kept.add_(flat.to(kept.device))
        else:
            self._sums[number] = self._home.moved(flat, self._rooms.get(number))

    def finish(self, number: int, finish: Callable[[Tensor], Waitable], empty: Callable[[], Tensor]) -> Waitable | None:
        """Sum a bucket's sums over the actors that own the same weights.

        Args:
            number: Number of the bucket.
            finish: Starts the reduction of a flat tensor in place.
            empty: Allocates one.

        Returns:
            The reduction under way; None if it is complete.
        """
        kept = self._sums[number]
        if not self.is_apart:
            return finish(kept)
        with torch.no_grad(), self._home.at_hand([kept], writes=True):
            flat = empty().copy_(kept)
            finish(flat).wait()
            kept.copy_(flat)
        return None

    @torch.no_grad()
    def hand_over(self) -> None:
        """Make the sums the gradients of parameters, or of masters."""
        for number, bucket in enumerate(self._buckets):
            if number not in self._sums:
                bucket.disown()
            elif not self.is_apart:
                bucket.adopt(self._sums[number])
            else:
                self._to_masters(bucket, self._sums[number])

    def _to_masters(self, bucket: Bucket, flat: Tensor) -> None:
        for name, gradient in bucket.gradients(flat):
            if gradient is not None and name in self._in_dtype:
                with self._home.at_hand([gradient]):
                    gradient = self._home.moved(gradient.to(self._in_dtype[name].dtype), self._in_dtype[name])
            self._masters[name].grad = gradient
