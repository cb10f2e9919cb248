"""The summed gradients that an actor gets, stored from their reduction until the update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor, nn

from raypar.actors.collective.group import Waitable
from raypar.actors.data_parallel.buckets import Bucket, CutBucket
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.machine.offload_storage import OffloadStorage
from raypar.actors.tensors import nbytes


@dataclass(eq=False)
class GradientSums:
    """The sums of gradients over the replicas, and over the rounds of a step, that an actor gets.

    On the device a sum stays in the flat tensor of its reduction, and becomes the gradient of the layers' parameters. A
    storage off the device has memory for it, and it becomes the gradient of the masters, in their dtype. So do sums of
    which each replica gets a part.

    Attributes:
        buckets: All buckets.
        received: The numbers of the buckets whose sums this actor gets.
        storage: Storage of the sums.
        masters: The weights that the actor updates, by logical name.
    """

    buckets: Sequence[Bucket]
    received: Collection[int]
    storage: OffloadStorage
    masters: Mapping[str, nn.Parameter]
    _sums: dict[int, Tensor] = field(default_factory=dict)  # by bucket
    _allocated: dict[int, Tensor] = field(default_factory=dict)  # by bucket, memory off the device
    _in_dtype: dict[str, Tensor] = field(default_factory=dict)  # by name, for gradients in the dtype of their masters

    def __post_init__(self) -> None:
        for number in self.received if self.is_off_device else ():
            bucket = self.buckets[number]
            self._allocated[number] = self.storage.empty(bucket.sum_size, bucket.grad_dtype)
            for name in bucket.summed:
                if (master := self.masters[name]).dtype != bucket.grad_dtype:
                    self._in_dtype[name] = self.storage.like(master, master.dtype)

    @property
    def is_off_device(self) -> bool:
        """Whether the sums are stored off the device."""
        return self.storage.is_off_device

    def __contains__(self, number: int) -> bool:
        return number in self._sums

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradients that are stored now; off the device, the memory for all sums of a step."""
        if self.is_off_device:
            return sum(map(nbytes, (*self._allocated.values(), *self._in_dtype.values())))
        return sum(self.buckets[number].sum_bytes for number in self._sums)

    def begin(self) -> None:
        """Drop all sums, at the beginning of a step."""
        self._sums.clear()

    @torch.no_grad()
    def add(self, number: int, flat: Tensor) -> None:
        """Add the sum of a round.

        Args:
            number: Number of the bucket.
            flat: Its flat tensor, (size,), or this actor's part of it, (sum_size,).
        """
        total = self._sums.get(number)
        if total is not None:
            with self.storage.accessible([total], writes=True):
                total.add_(flat.to(total.device))
        else:
            self._sums[number] = self.storage.moved(flat, self._allocated.get(number))

    def finish(
        self, number: int, finish: Callable[[Tensor], Waitable], empty: Callable[[int, torch.dtype], Tensor]
    ) -> Waitable | None:
        """Sum a bucket's sums over the actors that own the same weights.

        Args:
            number: Number of the bucket.
            finish: Starts the reduction of a flat tensor in place.
            empty: Allocates a flat tensor, given the number of elements and the dtype.

        Returns:
            The handle of the reduction; None if it is complete.
        """
        total = self._sums[number]
        if not self.is_off_device:
            return finish(total)
        with torch.no_grad(), self.storage.accessible([total], writes=True):
            flat = empty(total.numel(), total.dtype).copy_(total)
            finish(flat).wait()
            total.copy_(flat)
        return None

    @torch.no_grad()
    def hand_over(self, device: ComputeDevice) -> None:
        """Make the sums the gradients of parameters, or of masters.

        Args:
            device: The device that the sums are read from, all flags at once.
        """
        uses = self._uses(device)
        for number, bucket in enumerate(self.buckets):
            if number in self._sums and not self.is_off_device and not isinstance(bucket, CutBucket):
                bucket.adopt(self._sums[number], uses[number])
                continue
            bucket.drop_gradients()
            if number in self._sums:
                self._to_masters(bucket, self._sums[number], uses[number])

    def _uses(self, device: ComputeDevice) -> dict[int, list[float]]:
        """Return the flags of each bucket of whose sum this actor gets a part."""
        flags = {number: self.buckets[number].flags(flat) for number, flat in self._sums.items()}
        if not flags:
            return {}
        every = iter(device.read_back(torch.cat([*flags.values()]))().tolist())
        return {number: list(islice(every, one.numel())) for number, one in flags.items()}

    def _to_masters(self, bucket: Bucket, flat: Tensor, uses: Sequence[float]) -> None:
        for name, gradient in bucket.gradients(flat, uses):
            if gradient is not None and gradient.dtype != self.masters[name].dtype:
                with self.storage.accessible([gradient]):
                    gradient = self.storage.moved(gradient.to(self.masters[name].dtype), self._in_dtype.get(name))
            self.masters[name].grad = gradient
