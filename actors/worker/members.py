"""What a Ray actor is in a run: a worker or a parameter server, or nothing between two runs."""

from __future__ import annotations

from collections.abc import Mapping

from raypar.actors.collective import ray_groups
from raypar.actors.collective.group import Group
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.specs.injected_fault import InjectedFault
from raypar.actors.worker.build.plan import ActorPlan
from raypar.actors.worker.parameter_server import Server
from raypar.actors.worker.worker import Worker

Member = Worker | Server


def member_of(plan: ActorPlan, groups: Mapping[str, Group], place: ComputeDevice) -> Member:
    """Build the worker or the parameter server of a plan.

    Args:
        plan: The actor's plan.
        groups: The groups that it has joined, by their keys.
        place: The device that it computes on.

    Raises:
        UnequalReplicasError: A replica has made other weights of the same plan.
    """
    return (Server if plan.rank in plan.world.server_ranks else Worker)(plan, groups, place)


def count_fault(job: str, fault: InjectedFault) -> bool:
    """Count a fault that is about to happen, in Ray's key-value store; return whether it may."""
    return ray_groups.count_occurrence(f"{job}/{fault}", fault.times)


def worker_in(member: Member | None) -> Worker:
    """Return the worker that takes part in a run."""
    assert isinstance(member, Worker)
    return member


def there(member: Member | None) -> Member:
    """Return the member of a run that an actor is. Raises RuntimeError if it is none."""
    if member is None:
        raise RuntimeError("this actor takes no part in a run: start it with a plan")
    return member
