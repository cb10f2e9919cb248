"""The arguments of torch's collective ops, as ProcessGroupGloo and ProcessGroupNCCL take them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from raypar.actors.collective.reductions import ReduceOp


def options_of(kind: str, *, root: int | None = None, op: ReduceOp | None = None) -> Any:
    """Return the options of a collective op.

    Args:
        kind: The op as torch spells it, such as "Allreduce".
        root: Rank of its root; None if it has none.
        op: Its reduction; None if it has none.
    """
    options = getattr(c10d, f"{kind}Options")()
    if root is not None:
        options.rootRank = root
    if op is not None:
        options.reduceOp = getattr(dist.ReduceOp, op.upper())
    return options


def member_parts(tensor: Tensor | None, members: int) -> list[list[Tensor]]:
    """Return the members' equal parts of a contiguous tensor, by device of the process; none without a tensor."""
    return [] if tensor is None else [[*tensor.view(-1).chunk(members)]]
