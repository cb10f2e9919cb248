"""End a step on a worker whose weights and optimizer state are kept by parameter servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from raypar.actors.checkpoint.snapshot import Read
from raypar.actors.collective.group import Group
from raypar.actors.data_parallel.buckets import Bucket
from raypar.actors.specs.results import Updated


class ServedUpdate:
    """End of a step on a worker without an optimizer: it receives the new weights from the parameter servers.

    Args:
        buckets: Buckets of all the worker's parameters. The owner of each is the index of a server.
        groups: For each server, the group of this pipeline rank's replicas and that server, which is the last member.
    """

    def __init__(self, buckets: Sequence[Bucket], groups: Sequence[Group]) -> None:
        self._buckets, self._groups = buckets, groups

    def step(self, step: int, ballot: Tensor | None) -> Updated:
        """Receive the weights that the servers broadcast, and load them.

        If a server rejects the step with NonFiniteError, it broadcasts its unchanged weights. This method then loads
        those.

        Args:
            step: Number of the step (unused).
            ballot: The votes of the replicas (unused: the servers count them).

        Returns:
            An empty ``Updated``: the servers report the norm and the learning rate.
        """
        flats = [bucket.empty_weights() for bucket in self._buckets]
        groups = [self._groups[bucket.owner] for bucket in self._buckets]
        handles = [group.broadcast(flat, group.size - 1) for group, flat in zip(groups, flats, strict=True)]
        for handle in handles:
            handle.wait()
        for group in self._groups:
            group.synchronize()  # before any load: a server that died has sent no valid weights
        for bucket, flat in zip(self._buckets, flats, strict=True):
            bucket.load(flat)
        return Updated()

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Return an empty iterator: the servers report the state."""
        return iter(())

    def load(self, read: Read) -> None:
        """Do nothing: the servers load the state."""

    def use_averages(self, *, use: bool) -> None:
        """Do nothing: servers keep no averages."""
