"""ZeRO stage 1: split the optimizer state over the replicas instead of keeping a full copy on each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.actors.checkpoint.snapshot import Read
from raypar.actors.collective.group import Group, Handle
from raypar.actors.data_parallel.buckets import Bucket
from raypar.actors.machine.offload_storage import OffloadStorage
from raypar.actors.optim.step import Updater
from raypar.actors.specs.results import Updated


class SharedBucket(NamedTuple):
    """A bucket of weights that several replicas hold and one of them updates.

    Attributes:
        bucket: The bucket.
        replicas: Their group.
        owner: The rank in this group of the replica that updates the weights.
    """

    bucket: Bucket
    replicas: Group
    owner: int


class ShardedUpdate:
    """End of a step with an optimizer that is split over the replicas, by whole parameters.

    Each bucket has one replica as its owner. Only the owner receives the sum of the bucket's gradients; it updates the
    weights and broadcasts them to the other replicas. Reduce and broadcast together move as many bytes as an
    all_reduce, and each replica does only its part of the update and keeps only that part of the optimizer state.

    Args:
        updater: Optimizer of the parameters that this replica owns. All replicas and pipeline ranks step together.
        buckets: Buckets of the weights that several replicas hold, each with its owner.
        fixed: Logical names of the parameters whose memory must not move (see ``fixed_weights``). All other parameters
            move into the flat tensors that are broadcast, which saves a copy.
        allocate: Allocates a flat tensor on the device for the time of a broadcast, for weights that are stored off it;
            None if flat tensors are kept for the whole run.
        storage: Storage of the weights in that case.

    Source: Rajbhandari et al. 2020, "ZeRO", section 5.1 (P_os).
    """

    def __init__(
        self,
        updater: Updater,
        buckets: Sequence[SharedBucket],
        fixed: Set[str] = frozenset(),
        allocate: Callable[[int, torch.dtype], Tensor] | None = None,
        storage: OffloadStorage | None = None,
    ) -> None:
        self._updater = updater
        self._weights = [_Weights(bucket, fixed, allocate, storage) for bucket in buckets]
        self._most = len(buckets) if allocate is None else _MOST_FLATS

    def step(self, step: int, ballot: Tensor | None) -> Updated:
        """Update the owned parameters, and exchange all new weights with the other replicas.

        Args:
            step: Number of the step.
            ballot: As in ``Updater.step``.

        Returns:
            What ``Updater.step`` returns.

        Raises:
            NonFiniteError: As ``Updater.step``.
        """
        updated = self._updater.step(step, ballot)
        if not updated.is_skipped:
            self._share()
        return updated

    def use_averages(self, *, use: bool) -> None:
        """Replace all replicas' weights by their averages, or restore them; see ``Updater.use_averages``."""
        self._updater.use_averages(use=use)
        self._share()

    def _share(self) -> None:
        """Exchange all weights with the other replicas."""
        under_way = deque[tuple[Handle, _Weights]]()
        for weights in self._weights:
            under_way.append((weights.send(), weights))
            if len(under_way) > self._most:
                _receive(*under_way.popleft())
        for handle, weights in under_way:
            _receive(handle, weights)

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the state of the parameters that this replica owns, as ``Updater.state`` does."""
        return self._updater.state()

    def load(self, read: Read) -> None:
        """Load the state of the parameters that this replica owns, as ``Updater.load`` does."""
        self._updater.load(read)


_MOST_FLATS = 2  # concurrent broadcasts whose flat tensors are freed


@dataclass(eq=False)
class _Weights:
    """The flat tensor in which a bucket's weights are broadcast.

    The weights are views of it, unless one of them must not move; then they are copied in and out.
    """

    shared: SharedBucket
    fixed: Set[str]
    allocate: Callable[[int, torch.dtype], Tensor] | None
    storage: OffloadStorage | None

    def __post_init__(self) -> None:
        self._bucket, self._replicas, self._root = self.shared
        self._flat = self._empty() if self.allocate is None else None
        self._inside = self._flat is not None and self.fixed.isdisjoint(self._bucket.parameters)
        if self._flat is not None and self._inside:
            self._bucket.move_weights(self._flat)

    def send(self) -> Handle:
        """Start the broadcast of the weights from the bucket's owner to the other replicas."""
        flat = self._flat = self._empty() if self._flat is None else self._flat
        if not self._inside and self._root == self._replicas.rank:
            with self._accessible():
                self._bucket.read_into(flat)
        return self._replicas.broadcast(flat, self._root)

    def take(self) -> None:
        """Load the weights after the broadcast is over; a no-op where the parameters are views of the flat tensor."""
        assert self._flat is not None
        if not self._inside and self._root != self._replicas.rank:
            with self._accessible(writes=True):
                self._bucket.load(self._flat)
        if self.allocate is not None:
            self._flat = None

    def _empty(self) -> Tensor:
        return (self.allocate or self._replicas.empty)(self._bucket.elements, self._bucket.dtype)

    def _accessible(self, *, writes: bool = False) -> AbstractContextManager[None]:
        weights = self._bucket.parameters.values()
        return nullcontext() if self.storage is None else self.storage.accessible(weights, writes=writes)


def _receive(handle: Handle, weights: _Weights) -> None:
    handle.wait()
    weights.take()
