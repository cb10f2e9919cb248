"""The largest part of a pipeline rank's weights that a replica updates, if replicas divide them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from raypar.actors.mesh.world import World
from raypar.actors.sharding import block_of, first_ranks, num_blocks
from raypar.planner.sizes.tensors import Weight


@dataclass(frozen=True)
class PartSize:
    """The parameters that an actor updates.

    Attributes:
        count: How many they are.
        matrices: How many of them Muon updates; 0 if the optimizer is another one.
    """

    count: int
    matrices: int


def largest_parts(
    model: Iterable[Weight], held: Sequence[Collection[Weight]], world: World, is_matrix: Callable[[Weight], bool]
) -> list[PartSize]:
    """Return the part of the replica whose optimizer keeps most, of each pipeline rank.

    Replicas cut each tensor, so it is the mean but for a few blocks. Of experts that actors divide, the replica that
    has most of them counts, which may be another actor.

    Args:
        model: The tensors of an actor of each stage, in the order of the stages. One may be there twice.
        held: By pipeline rank, the tensors of an actor before they are shared out.
        world: The ranks of the run.
        is_matrix: Whether Muon updates a tensor.
    """
    found, every = [PartSize(0, 0)] * len(held), [one for weight in model for one in weight.each()]
    for is_expert, ranks in ((False, world.owners), (True, world.experts.owners if world.experts else 1)):
        alike = {one.name: one for one in every if one.is_expert == is_expert}
        firsts = first_ranks({name: one.held for name, one in alike.items()}, ranks)
        for pp, weights in enumerate(held):
            own = [one for weight in weights for one in weight.each() if one.is_expert == is_expert]
            most = max(_parts(own, firsts, ranks, is_matrix), key=lambda part: 2 * part.count - part.matrices)
            found[pp] = PartSize(found[pp].count + most.count, found[pp].matrices + most.matrices)
    return found


def counts_by_rank(elements: Mapping[str, int], firsts: Mapping[str, int], ranks: int) -> list[int]:
    """Count the elements that each rank has of tensors that are cut by an ``ElementCut``.

    It takes time for each tensor and for each rank, but not for each rank of each tensor.

    Args:
        elements: Elements of each tensor.
        firsts: The rank at which each begins.
        ranks: Number of ranks.
    """
    every, changes = 0, [0] * (ranks + 1)  # what all have, and from each rank on, how many more or fewer than before it
    for name, count in elements.items():
        block, first = block_of(count), firsts[name]
        base, longer = divmod(num_blocks(count), ranks)
        every += base * block
        for start, stop in ((first, min(first + longer, ranks)), (0, max(0, first + longer - ranks))):
            changes[start] += block
            changes[stop] -= block
        last = (first + (ranks if base else longer) - 1) % ranks  # its last block may be short
        short = num_blocks(count) * block - count
        changes[last] -= short
        changes[last + 1] += short
    return [every + more for more in accumulate(changes[:ranks])]


def _parts(
    weights: Collection[Weight], firsts: Mapping[str, int], ranks: int, is_matrix: Callable[[Weight], bool]
) -> list[PartSize]:
    """Return the part of each rank."""
    counts = counts_by_rank({one.name: one.held for one in weights}, firsts, ranks)
    matrices = counts_by_rank({one.name: one.held for one in weights if is_matrix(one)}, firsts, ranks)
    return [PartSize(*both) for both in zip(counts, matrices, strict=True)]
