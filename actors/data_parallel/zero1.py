"""ZeRO stage 1: split the optimizer state over the replicas instead of keeping a full copy on each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from torch import Tensor

from raypar.actors.checkpoint.snapshot import Read
from raypar.actors.collective.group import Group, Handle
from raypar.actors.data_parallel.buckets import Bucket
from raypar.actors.optim.step import Updater
from raypar.actors.specs.results import Updated


class SharedBucket(NamedTuple):
    """A bucket of weights that several replicas hold and one of them updates.

    Attributes:
        bucket: The bucket.
        replicas: Their group.
        owner: The rank in it of the one that updates the weights.
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
        buckets: Buckets of this worker's parameters that other replicas hold too, each with its owner.
        fixed: Logical names of the parameters whose memory must not move (see ``fixed_weights``). All other parameters
            move into the flat tensors that are broadcast, which spares a copy.

    Source: Rajbhandari et al. 2020, "ZeRO", section 5.1 (P_os).
    """

    def __init__(self, updater: Updater, buckets: Sequence[SharedBucket], fixed: Set[str]) -> None:
        self._updater = updater
        self._weights = [_Weights(bucket, fixed) for bucket in buckets]

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
        if updated.is_skipped:
            return updated
        for handle, weights in [(weights.send(), weights) for weights in self._weights]:
            handle.wait()
            weights.take()
        return updated

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the state of the parameters that this replica owns, as ``Updater.state`` does."""
        return self._updater.state()

    def load(self, read: Read) -> None:
        """Load the state of the parameters that this replica owns, as ``Updater.load`` does."""
        self._updater.load(read)


class _Weights:
    """The flat tensor in which a bucket's weights are broadcast.

    The weights are views of it, unless one of them must not move; then they are copied in and out.
    """

    def __init__(self, shared: SharedBucket, fixed: Set[str]) -> None:
        self._bucket, self._replicas, self._root = shared
        self._flat = self._replicas.empty(self._bucket.elements, self._bucket.dtype)
        self._inside = fixed.isdisjoint(self._bucket.parameters)
        if self._inside:
            self._bucket.settle(self._flat)

    def send(self) -> Handle:
        """Start the broadcast of the weights from the bucket's owner to the other replicas."""
        if not self._inside and self._root == self._replicas.rank:
            self._flat.copy_(self._bucket.weights())
        return self._replicas.broadcast(self._flat, self._root)

    def take(self) -> None:
        """Load the weights after the broadcast is over; a no-op where the parameters are views of the flat tensor."""
        if not self._inside and self._root != self._replicas.rank:
            self._bucket.load(self._flat)
