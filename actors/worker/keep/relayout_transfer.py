"""An actor's part in the move of a run to another layout: it sends and receives parts of the state, and loads them."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from contextlib import nullcontext

import torch

from raypar.actors.collective import ray_groups
from raypar.actors.collective.group import Group
from raypar.actors.relayout.handover import Handover
from raypar.actors.relayout.moves import TensorMove, TransferGroup
from raypar.actors.worker.members import Member

RELAYOUT = "relayout"  # the axis under which the ledger counts


def passed_on(
    handover: Handover,
    member: Member | None,
    joined: MutableMapping[str, Group],
    moves: Sequence[TensorMove],
    transfer: TransferGroup | None,
) -> dict[str, int]:
    """Send the parts that others need, and receive and load the parts that this actor needs.

    Args:
        handover: The parts that it has and needs.
        member: The worker or server that it is in the new layout; None if it has no rank there.
        joined: The groups that ``abort`` aborts, by key: the group of this transfer is added meanwhile.
        moves: The moves from and to this actor; see ``Handover.pass_on``.
        transfer: The group of all senders and receivers; None if nothing is sent.

    Returns:
        The bytes that this actor has sent and received, by op.

    Raises:
        ActionError: Another actor failed.
    """
    with nullcontext() if member is None else member.probe.idle():
        try:
            if transfer is not None:
                device = torch.device("cpu") if member is None else member.context.device.device
                joined[RELAYOUT] = ray_groups.join(transfer.name, RELAYOUT, *transfer[1:], device=device)
            group = joined.get(RELAYOUT)
            handover.pass_on(moves, group)
            if member is not None:
                member.state.adopt(handover.read)
        except Exception as error:
            if member is None:
                raise
            raise member.context.failed("relayout", None, error) from None
    if group is None:
        return {}
    ray_groups.leave(joined.pop(RELAYOUT).name)
    return {op: entry.bytes for (_, op), entry in group.ledger.entries().items()}
