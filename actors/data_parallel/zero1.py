"""ZeRO stages 1 and 2: split the optimizer state over the replicas instead of keeping a full copy on each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Protocol

import torch
from torch import Tensor

from raypar.actors.checkpoint.snapshot import Read
from raypar.actors.collective.group import Group, Handle
from raypar.actors.data_parallel.buckets import CutBucket
from raypar.actors.machine.offload_storage import OffloadStorage
from raypar.actors.optim.masters import Masters
from raypar.actors.optim.step import Updater
from raypar.actors.optim.votes import ReadBallot
from raypar.actors.sharding import Shard
from raypar.actors.specs.results import Updated


class SharedWeights(Protocol):
    """Weights that several replicas hold, and that one message exchanges."""

    def send(self) -> Handle:
        """Start the exchange of the new weights."""

    def take(self) -> None:
        """Load the weights after the exchange."""


class ShardedUpdate:
    """End of a step with an optimizer that is split over the replicas.

    Each replica gets its part of the summed gradients, updates that part of the weights, and sends it to the other
    replicas. Both messages together move as many bytes as an all_reduce, and each replica keeps only its part of the
    optimizer state.

    Args:
        updater: Optimizer of what this replica updates. All replicas and pipeline ranks step together.
        weights: The weights that several replicas hold, in the order of their exchange.
        most: The largest number of exchanges at a time; None for any.

    Source: Rajbhandari et al. 2020, "ZeRO", section 5.1 (P_os).
    """

    def __init__(
        self,
        updater: Updater,
        weights: Sequence[SharedWeights],
        most: int | None = None,
    ) -> None:
        self._updater, self._weights = updater, weights
        self._most = len(weights) if most is None else most

    def step(self, step: int, ballot: ReadBallot) -> Updated:
        """Update this replica's part of the weights, and exchange all new weights with the other replicas.

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
        under_way = deque[tuple[Handle, SharedWeights]]()
        for weights in self._weights:
            under_way.append((weights.send(), weights))
            if len(under_way) > self._most:
                _receive(*under_way.popleft())
        for handle, weights in under_way:
            _receive(handle, weights)

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the state of what this replica updates, as ``Updater.state`` does."""
        return self._updater.state()

    def load(self, read: Read) -> None:
        """Load the state of what this replica updates, as ``Updater.load`` does."""
        self._updater.load(read)


MOST_FLATS = 2  # concurrent gathers whose flat tensors are freed


class CutWeights:
    """The flat tensor in which a bucket's weights are gathered from the replicas, each of which updates its part.

    The weights are views of it, unless one of them must not move; then they are copied out.

    Args:
        bucket: The bucket.
        replicas: The group of the replicas.
        masters: The weights that this actor updates, which will be views of the flat tensor or be copied into it.
        fixed: Logical names of the parameters whose memory must not move (see ``fixed_weights``).
    """

    def __init__(self, bucket: CutBucket, replicas: Group, masters: Masters, fixed: Set[str]) -> None:
        self._bucket, self._replicas = bucket, replicas
        self._flat = replicas.empty(bucket.elements, bucket.dtype)
        self._inside = fixed.isdisjoint(bucket.parameters)
        if self._inside:
            bucket.move_weights(self._flat)
        else:
            bucket.read_into(self._flat)
        masters.write_to({name: bucket.layout.span(name, self._flat) for name in bucket.layout.own}, are=self._inside)

    def send(self) -> Handle:
        """Start to gather the weights."""
        return self._replicas.all_gather_cut(self._flat, None, self._bucket.layout.cut)

    def take(self) -> None:
        """Load the gathered weights; a no-op where the parameters are views of the flat tensor."""
        if not self._inside:
            self._bucket.load(self._flat)


class StoredCutWeights:
    """A bucket of weights off the device, which replicas gather, each of which updates its part.

    Args:
        bucket: The bucket, of the stored weights.
        replicas: The group of the replicas.
        parts: The spans of weights that this actor updates, by logical name.
        storage: Storage of the weights.
        allocate: Allocates a flat tensor on the device, for the time in which it is gathered.
    """

    def __init__(
        self,
        bucket: CutBucket,
        replicas: Group,
        parts: Mapping[str, Shard],
        storage: OffloadStorage,
        allocate: Callable[[int, torch.dtype], Tensor],
    ) -> None:
        self._bucket, self._replicas = bucket, replicas
        self._storage, self._allocate = storage, allocate
        self._own = {name: parts[name].take(bucket.parameters[name].detach()) for name in bucket.layout.own}
        self._flat: Tensor | None = None

    def send(self) -> Handle:
        """Copy this actor's parts to the device and start to gather the weights."""
        flat = self._flat = self._allocate(self._bucket.elements, self._bucket.dtype)
        with self._storage.accessible(self._own.values()):
            for name, part in self._own.items():
                self._bucket.layout.span(name, flat).copy_(part)
        return self._replicas.all_gather_cut(flat, None, self._bucket.layout.cut)

    def take(self) -> None:
        """Load the gathered weights, and free the flat tensor."""
        assert self._flat is not None
        with self._storage.accessible(self._bucket.parameters.values(), writes=True):
            self._bucket.load(self._flat)
        self._flat = None


def _receive(handle: Handle, weights: SharedWeights) -> None:
    handle.wait()
    weights.take()
