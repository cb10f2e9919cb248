"""When and how the user's layers may be called in the user's process, before actors start. Imports torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO

import torch

from raypar.actors.collective.replicas import RefusedReplicas, RepeatedReplicas, ReplicaMembers, entered
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run


def may_call(run: Run, skeleton: Skeleton) -> bool:
    """Return whether a run's layers are the user's own, on CPUs, and can be built without weights.

    Args:
        run: The run, checked.
        skeleton: Its model without weights.
    """
    on_cpus = run.device != "cuda" and not torch.cuda.is_available()
    return isinstance(run.model, Layers) and on_cpus and run.mesh.cp == 1 and skeleton.model.is_deferred


@contextmanager
def unnoticed() -> Iterator[None]:
    """Suppress warnings and output of calls, and restore the state of random numbers at the end."""
    with torch.random.fork_rng(), warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def tried_as(run: Run) -> Iterator[ReplicaMembers]:
    """Return a context in which layers and losses are tried as those of the first replica of a run.

    All other replicas are taken to have the same values.
    """
    count, fault = run.mesh.ways("dp"), run.replica_fault
    members = RepeatedReplicas(count) if fault is None or count == 1 else RefusedReplicas(fault)
    with entered(members):
        yield members
