"""The role of a Ray actor in a run: a worker or a parameter server; none between two runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from raypar.actors.collective.group import Group
from raypar.actors.collective.ray import ray_groups
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.specs.injected_fault import InjectedFault
from raypar.actors.worker.build.plan import ActorPlan
from raypar.actors.worker.parameter_server import Server
from raypar.actors.worker.worker import Worker

LAUNCH = "launch"  # the axis under which the ledger counts what is sent to build a member
Member = Worker | Server


def member_of(plan: ActorPlan, groups: Mapping[str, Group], device: ComputeDevice) -> Member:
    """Build the worker or the parameter server of a plan.

    Args:
        plan: The actor's plan.
        groups: The groups that it has joined, by their keys.
        device: The device that it computes on.

    Raises:
        UnequalReplicasError: A replica has built other weights from the same plan.
    """
    with ExitStack() as counted:
        for ledger in {group.ledger for group in groups.values()}:
            counted.enter_context(ledger.counting_as(LAUNCH))
        return (Server if plan.rank in plan.world.server_ranks else Worker)(plan, groups, device)


def count_fault(job: str, fault: InjectedFault) -> bool:
    """Count an injected fault in Ray's key-value store; return whether it may happen."""
    return ray_groups.count_occurrence(f"{job}/{fault}", fault.times)


def worker_in(member: Member | None) -> Worker:
    """Return the worker that takes part in a run."""
    assert isinstance(member, Worker)
    return member


def there(member: Member | None) -> Member:
    """Return the member. Raises RuntimeError if the actor takes no part in a run."""
    if member is None:
        raise RuntimeError("this actor takes no part in a run: start it with a plan")
    return member
