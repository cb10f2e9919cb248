"""The squares of gradients whose parameters a tensor-parallel group shards."""

from __future__ import annotations

from collections.abc import Collection

import torch

from raypar.actors.optim.block_norm import BlockNorms, ExactSum
from raypar.actors.tensor_parallel.gradients import ShardedGradients, demand_equal_squares


def whole_squares(norms: BlockNorms, tensors: ShardedGradients, experts: Collection[str]) -> tuple[ExactSum, ExactSum]:
    """Add the squares of gradients over a tensor-parallel group.

    They are one message of a fixed size. Where gradients are watched, it has also one number for each replicated one.

    Args:
        norms: The norms of this member's parts of the gradients.
        tensors: The parts of the group's members.
        experts: Logical names of the parameters of experts.

    Returns:
        The sum over all parameters that are not experts', and that over experts; the same on every member, but for
        private parameters.

    Raises:
        ValueError: The gradients are watched, and that of a replicated parameter differs between members.
    """
    dense = _own_squares(norms, tensors, [name for name in norms.names if name not in experts])
    common = _own_squares(norms, tensors, [name for name in norms.names if name in experts])
    if tensors.group is not None:
        names, count = tensors.compared(norms.names), len(dense.numbers())
        own = torch.tensor([norms.of(name).double().square().sum() for name in names], dtype=torch.float64)
        message = torch.cat((torch.tensor([*dense.numbers(), *common.numbers()], dtype=torch.float64), own))
        tensors.group.host.all_reduce(message).wait()
        total = message.tolist()
        dense, common = ExactSum.read(total[:count]), ExactSum.read(total[count : 2 * count])
        demand_equal_squares(names, own, message[2 * count :], tensors.group)
    return dense, common + norms.squares([name for name in norms.names if name in tensors.private])


def _own_squares(norms: BlockNorms, tensors: ShardedGradients, names: Collection[str]) -> ExactSum:
    """Return what this member adds to the sum over the group: elements are counted once, those not finite always."""
    counted, others = list[str](), list[str]()
    for name in names:
        if name not in tensors.private:
            (counted if tensors.counts(name) else others).append(name)
    return norms.squares(counted) + norms.squares(others).without_units()
