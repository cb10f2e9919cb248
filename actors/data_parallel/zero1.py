"""ZeRO stage 1: the optimizer, which replicas would all keep alike, is split over them (Rajbhandari et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from torch import Tensor

from raypar.actors.checkpoint.snapshot import Read
from raypar.actors.collective.group import Group, Handle
from raypar.actors.data_parallel.buckets import Bucket
from raypar.actors.optim.step import Updater


class ShardedUpdate:
    """The end of a step with an optimizer that is split over the replicas, by whole parameters.

    The owner of a bucket alone has the sum of its gradients; it updates the weights and sends them to the others. That
    moves what an all_reduce does, and each replica does a part of the update and keeps that part of its state.

    updater   of what this replica owns, in step with those of all replicas and pipeline ranks
    buckets   of all of this worker's parameters; their owners are replicas
    replicas  of this pipeline rank
    fixed     the parameters that have to stay where they are; all others move into what is sent
    """

    def __init__(self, updater: Updater, buckets: Sequence[Bucket], replicas: Group, fixed: Set[str]) -> None:
        self._updater, self._replicas = updater, replicas
        self._weights = [_Weights(bucket, replicas, fixed) for bucket in buckets]

    def step(self, step: int, ballot: Tensor | None) -> float:
        """As Updater.step; the sum of the ballots is at the first replica."""
        norm = self._updater.step(step, ballot if self._replicas.rank == 0 else None)
        for handle, weights in [(weights.send(), weights) for weights in self._weights]:
            handle.wait()
            weights.take()
        return norm

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """As Updater.state, of what this replica owns."""
        return self._updater.state()

    def load(self, read: Read) -> None:
        """As Updater.load, of what this replica owns."""
        self._updater.load(read)


class _Weights:
    """The weights of a bucket as one flat tensor. They live in it, unless one of them has to stay where it is."""

    def __init__(self, bucket: Bucket, replicas: Group, fixed: Set[str]) -> None:
        self._bucket, self._replicas = bucket, replicas
        self._flat = replicas.empty(bucket.elements, bucket.dtype)
        self._inside = fixed.isdisjoint(bucket.parameters)
        if self._inside:
            bucket.settle(self._flat)

    def send(self) -> Handle:
        """From their owner to all others."""
        if not self._inside and self._bucket.owner == self._replicas.rank:
            self._flat.copy_(self._bucket.weights())
        return self._replicas.broadcast(self._flat, self._bucket.owner)

    def take(self) -> None:
        """They are here."""
        if not self._inside and self._bucket.owner != self._replicas.rank:
            self._bucket.load(self._flat)
