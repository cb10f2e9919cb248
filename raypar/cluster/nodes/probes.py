"""Actors that take no CPU of their nodes, for measurements between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError, RuntimeEnvSetupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypar.actors.errors import first_line
from raypar.cluster.placement.placement import Node
from raypar.errors import JobError


@contextmanager
def probes(cls: type, nodes: Sequence[Node], gpus: int = 0) -> Iterator[list[Any]]:
    """Start one actor on each of the nodes, which may be named more than once, and end them with the context.

    Args:
        cls: The class of the actors, without arguments.
        nodes: The node of each.
        gpus: Number of GPUs of each actor, which no other process sees.

    Yields:
        Their handles.
    """
    decorate: Any = ray.remote
    remote = decorate(num_cpus=0, num_gpus=gpus or None, max_restarts=0, max_task_retries=0)(cls)
    pins = [NodeAffinitySchedulingStrategy(node.id, soft=False) for node in nodes]
    handles = [remote.options(scheduling_strategy=pin).remote() for pin in pins]
    try:
        yield handles
    finally:
        for handle in handles:
            ray.kill(handle)


def remote_cause(error: Exception) -> Exception:
    """Return the exception that a task or an actor has raised, without Ray's wrapper."""
    return error.cause if isinstance(error, RayTaskError) and error.cause is not None else error


def ray_error_reason(error: RayError) -> str:
    """Return in one line why a call failed: the exception on the node, without Ray's wrapper."""
    cause = remote_cause(error)
    if isinstance(cause, RuntimeEnvSetupError):  # its first line is always the same
        last = str(cause).strip().splitlines()[-1].strip()
        return f"{type(cause).__name__}: {first_line(cause)} {last}"
    return f"{type(cause).__name__}: {first_line(cause)}"


def answers(calls: Sequence[Any], seconds: float) -> list[Any]:
    """Return the results of calls to probes.

    Args:
        calls: The calls.
        seconds: Timeout.

    Raises:
        JobError: A call failed or did not answer in time.
    """
    try:
        found: list[Any] = ray.get(list(calls), timeout=seconds)
    except GetTimeoutError:
        raise JobError(f"there was no answer within {seconds:g} s") from None
    except RayError as error:
        raise JobError(ray_error_reason(error)) from error
    return found
