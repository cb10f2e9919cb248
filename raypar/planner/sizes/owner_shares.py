"""The largest optimizer shard of a pipeline rank: ZeRO assigns whole tensors, so shards are uneven."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from raypar.actors.data_parallel.owners import share_out
from raypar.actors.mesh.world import World
from raypar.planner.sizes.tensors import Weight


@dataclass(frozen=True)
class OwnerShare:
    """An owner's parameters on an actor.

    Attributes:
        count: How many they are.
        matrices: How many of them Muon updates; 0 if the optimizer is another one.
    """

    count: int
    matrices: int


def largest_share(weights: Collection[Weight], world: World, is_matrix: Callable[[Weight], bool]) -> OwnerShare:
    """Return the share of the replica whose optimizer keeps most, as workers share parameters out.

    Tensors are owned whole, so it has more than the N-th part: much more if few large tensors are most of a model. Of
    experts that actors divide, the owner that has most of them counts, which may be another actor.

    Args:
        weights: The tensors of an actor before they are shared out.
        world: The ranks of the run.
        is_matrix: Whether Muon updates a tensor.
    """
    experts = world.experts.owners if world.experts else 1
    each = [one for weight in weights for one in weight.each()]
    dense = _largest((one for one in each if not one.is_expert), world.owners, is_matrix)
    of_experts = _largest((one for one in each if one.is_expert), experts, is_matrix)
    return OwnerShare(dense.count + of_experts.count, dense.matrices + of_experts.matrices)


def _largest(weights: Iterable[Weight], owners: int, is_matrix: Callable[[Weight], bool]) -> OwnerShare:
    by_name = {one.name: one for one in weights}
    shares = [OwnerShare(0, 0)] * owners
    for name, owner in share_out({name: one.whole for name, one in by_name.items()}, owners).items():
        one, share = by_name[name], shares[owner]
        shares[owner] = OwnerShare(share.count + one.held, share.matrices + one.held * is_matrix(one))
    return max(shares, key=lambda share: 2 * share.count - share.matrices)
