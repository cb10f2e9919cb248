"""ZeRO stage 1: the optimizer, which replicas would all keep alike, is split over them (Rajbhandari et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from raypar.actors.buckets import Bucket
from raypar.actors.copies import Read
from raypar.actors.group import Group
from raypar.actors.update import Updater


class ShardedUpdate:
    """The end of a step with an optimizer that is split over the replicas, by whole parameters.

    The owner of a bucket alone has the sum of its gradients; it updates the weights and sends them to the others. That
    moves what an all_reduce does, and each replica does a part of the update and keeps that part of its state.

    updater   of what this replica owns, in step with those of all replicas and pipeline ranks
    buckets   of all of this worker's parameters; their owners are replicas
    replicas  of this pipeline rank
    """

    def __init__(self, updater: Updater, buckets: Sequence[Bucket], replicas: Group) -> None:
        self._updater, self._buckets, self._replicas = updater, buckets, replicas
        self._weights = [replicas.empty(bucket.elements, bucket.dtype) for bucket in buckets]
        for bucket, weights in zip(buckets, self._weights, strict=True):
            bucket.settle(weights)

    def step(self, step: int, ballot: Tensor | None) -> float:
        """As Updater.step; the sum of the ballots is at the first replica."""
        norm = self._updater.step(step, ballot if self._replicas.rank == 0 else None)
        pairs = zip(self._buckets, self._weights, strict=True)
        for handle in [self._replicas.broadcast(weights, bucket.owner) for bucket, weights in pairs]:
            handle.wait()
        return norm

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """As Updater.state, of what this replica owns."""
        return self._updater.state()

    def load(self, read: Read) -> None:
        """As Updater.load, of what this replica owns."""
        self._updater.load(read)
