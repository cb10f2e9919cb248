"""The end of a step on a worker whose weights are kept by parameter servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from raypar.actors.checkpoint.snapshot import Read
from raypar.actors.collective.group import Group
from raypar.actors.data_parallel.buckets import Bucket


class ServedUpdate:
    """Takes the new weights from the servers; the worker has no optimizer.

    buckets  of all its parameters, each owned by one server
    groups   by owner: the replicas of this pipeline rank and that server, the last member
    """

    def __init__(self, buckets: Sequence[Bucket], groups: Sequence[Group]) -> None:
        self._buckets, self._groups = buckets, groups

    def step(self, step: int, ballot: Tensor | None) -> None:
        """Load the weights that the servers send; those of before, if a server votes no and raises NonFiniteError."""
        flats = [bucket.room() for bucket in self._buckets]
        groups = [self._groups[bucket.owner] for bucket in self._buckets]
        handles = [group.broadcast(flat, group.size - 1) for group, flat in zip(groups, flats, strict=True)]
        for handle in handles:
            handle.wait()
        for group in self._groups:
            group.synchronize()  # of a server that is gone no weight may be taken
        for bucket, flat in zip(self._buckets, flats, strict=True):
            bucket.load(flat)

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Nothing: the servers say it."""
        return iter(())

    def load(self, read: Read) -> None:
        """Nothing: the servers keep it."""
