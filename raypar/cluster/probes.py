"""Actors that take nothing of their nodes, for measurements between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypar.actors.errors import first_line
from raypar.cluster.placement import Node
from raypar.errors import JobError


@contextmanager
def probes(cls: type, nodes: Sequence[Node]) -> Iterator[list[Any]]:
    """Start one actor on each of the nodes, which may be named more than once, and end them with the context.

    Args:
        cls: The class of the actors, without arguments.
        nodes: The node of each.

    Yields:
        Their handles.
    """
    decorate: Any = ray.remote
    remote = decorate(num_cpus=0, max_restarts=0, max_task_retries=0)(cls)
    pins = [NodeAffinitySchedulingStrategy(node.id, soft=False) for node in nodes]
    handles = [remote.options(scheduling_strategy=pin).remote() for pin in pins]
    try:
        yield handles
    finally:
        for handle in handles:
            ray.kill(handle)


def answers(calls: Sequence[Any], seconds: float) -> list[Any]:
    """Return what calls of probes return.

    Args:
        calls: The calls.
        seconds: Timeout.

    Raises:
        JobError: One failed or did not answer in time.
    """
    try:
        found: list[Any] = ray.get(list(calls), timeout=seconds)
    except GetTimeoutError:
        raise JobError(f"there was no answer within {seconds:g} s") from None
    except RayError as error:
        raise JobError(first_line(error)) from error
    return found
