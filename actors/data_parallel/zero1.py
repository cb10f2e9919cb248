"""ZeRO stage 1: split the optimizer state over the replicas instead of keeping a full copy on each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from torch import Tensor

from raypar.actors.checkpoint.snapshot import Read
from raypar.actors.collective.group import Group, Handle
from raypar.actors.data_parallel.buckets import Bucket
from raypar.actors.optim.step import Updater
from raypar.actors.specs.results import Updated


class ShardedUpdate:
    """End of a step with an optimizer that is split over the replicas, by whole parameters.

    Each bucket has one replica as its owner. Only the owner receives the sum of the bucket's gradients; it updates the
    weights and broadcasts them to the other replicas. Reduce and broadcast together move as many bytes as an
    all_reduce, and each replica does only its part of the update and keeps only that part of the optimizer state.

    Args:
        updater: Optimizer of the parameters that this replica owns. All replicas and pipeline ranks step together.
        buckets: Buckets of all of this worker's parameters. The owner of each is the rank of a replica.
        replicas: The group of this pipeline rank's replicas.
        fixed: Logical names of the parameters whose memory must not move (see ``fixed_weights``). All other parameters
            move into the flat tensors that are broadcast, which spares a copy.

    Source: Rajbhandari et al. 2020, "ZeRO", section 5.1 (P_os).
    """

    def __init__(self, updater: Updater, buckets: Sequence[Bucket], replicas: Group, fixed: Set[str]) -> None:
        self._updater, self._replicas = updater, replicas
        self._weights = [_Weights(bucket, replicas, fixed) for bucket in buckets]

    def step(self, step: int, ballot: Tensor | None) -> Updated:
        """Update the owned parameters, and exchange all new weights with the other replicas.

        Args:
            step: Number of the step.
            ballot: As in ``Updater.step``. It is used on replica 0 only, the one that holds the sum of the ballots.

        Returns:
            What ``Updater.step`` returns.

        Raises:
            NonFiniteError: As ``Updater.step``.
        """
        updated = self._updater.step(step, ballot if self._replicas.rank == 0 else None)
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

    def __init__(self, bucket: Bucket, replicas: Group, fixed: Set[str]) -> None:
        self._bucket, self._replicas = bucket, replicas
        self._flat = replicas.empty(bucket.elements, bucket.dtype)
        self._inside = fixed.isdisjoint(bucket.parameters)
        if self._inside:
            bucket.settle(self._flat)

    def send(self) -> Handle:
        """Start the broadcast of the weights from the bucket's owner to the other replicas."""
        if not self._inside and self._bucket.owner == self._replicas.rank:
            self._flat.copy_(self._bucket.weights())
        return self._replicas.broadcast(self._flat, self._bucket.owner)

    def take(self) -> None:
        """Load the weights after the broadcast is over; a no-op where the parameters are views of the flat tensor."""
        if not self._inside and self._bucket.owner != self._replicas.rank:
            self._bucket.load(self._flat)
