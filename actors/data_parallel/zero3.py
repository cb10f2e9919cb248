"""End a step on a replica that keeps only the weights that it owns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from raypar.actors.checkpoint.snapshot import Read
from raypar.actors.optim.step import Updater
from raypar.actors.specs.results import Updated


class GatheredUpdate:
    """End of a step with weights that are sharded over the replicas.

    Only the owner of a weight receives the sum of its gradients. It updates its shard, and the next UNSHARD gathers the
    new weights.

    Args:
        updater: Optimizer of the shards that this replica owns. All replicas and pipeline ranks step together.
        shards: The owned shards by logical name.
        parameters: The parameters of the layers by logical name, whose gradients the reducer sums.
        leads: Whether this replica holds the sum of the ballots: replica 0 of the owners.

    Source: Rajbhandari et al. 2020, "ZeRO", section 5.3 (P_os+g+p).
    """

    def __init__(
        self,
        updater: Updater,
        shards: Mapping[str, nn.Parameter],
        parameters: Mapping[str, nn.Parameter],
        *,
        leads: bool,
    ) -> None:
        self._updater, self._shards, self._parameters, self._leads = updater, shards, parameters, leads

    def step(self, step: int, ballot: Tensor | None) -> Updated:
        """Update the owned shards. Arguments, return value and errors are those of ``ShardedUpdate.step``."""
        for name, shard in self._shards.items():
            shard.grad, self._parameters[name].grad = self._parameters[name].grad, None
        return self._updater.step(step, ballot if self._leads else None)

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the owned shards and their state, as ``Updater.state`` does."""
        return self._updater.state()

    def load(self, read: Read) -> None:
        """Load the state of the owned shards, as ``Updater.load`` does."""
        self._updater.load(read)
