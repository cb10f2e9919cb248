"""Check that the order in which values arrive may decide what actors do next."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceChoice

_FIX = "set order to 'row'"


def order_faults(run: Run, right: Callable[..., bool]) -> Iterator[str]:
    """Yield the reasons why a run can't have its order.

    Args:
        run: The run.
        right: Returns whether some fields have their declared types and ranges.
    """
    if not right("order", "executor") or run.order == "row":
        return
    if run.executor != "tasks":
        told = "its actors follow their rows by themselves: set executor to 'tasks'"
        yield f"order is 'dynamic', but executor is {run.executor!r}, and {told}, or order to 'row'"
    if right("zero", "offload") and (run.zero == 3 or run.offload == "parameters"):
        named = "zero is 3" if run.zero == 3 else "offload is 'parameters'"
        yield f"order is 'dynamic', but {named}, and weights come for use in the order of the rows: {_FIX}"
    if right("device"):
        yield from order_on(run, run.device)


def order_on(run: Run, device: DeviceChoice) -> Iterator[str]:
    """Yield a fault if messages on a device have no tags, so that they must come in the order of the rows.

    Args:
        run: The run.
        device: The device, as far as it is known.
    """
    if run.order == "dynamic" and device == "cuda":
        yield f"order is 'dynamic', but messages of NCCL have no tags on GPUs: {_FIX}, or device to 'cpu'"
