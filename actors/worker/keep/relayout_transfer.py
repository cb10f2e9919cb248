"""An actor's part in the move of a run to another layout: it gives what others need, and loads what it needs."""

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
    meeting: TransferGroup | None,
) -> dict[str, int]:
    """Give others what they need, get what this actor needs, and load it.

    Args:
        handover: What it has, and what it needs.
        member: What it is in the new layout; None if it has no rank there.
        joined: The groups that are aborted if it is to stop, by key: that of this exchange is one of them meanwhile.
        moves: The moves from and to this actor; see ``Handover.pass_on``.
        meeting: The group of all who give or get something; None if nothing is sent.

    Returns:
        The bytes that this actor has sent and received, by op.

    Raises:
        ActionError: Another actor failed.
    """
    with nullcontext() if member is None else member.probe.idle():
        try:
            if meeting is not None:
                device = torch.device("cpu") if member is None else member.seat.place.device
                joined[RELAYOUT] = ray_groups.join(meeting.name, RELAYOUT, *meeting[1:], device=device)
            group = joined.get(RELAYOUT)
            handover.pass_on(moves, group)
            if member is not None:
                member.state.adopt(handover.read)
        except Exception as error:
            if member is None:
                raise
            raise member.seat.failed("relayout", None, error) from None
    if group is None:
        return {}
    ray_groups.leave(joined.pop(RELAYOUT).name)
    return {op: entry.bytes for (_, op), entry in group.ledger.entries().items()}
