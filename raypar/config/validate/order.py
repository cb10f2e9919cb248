"""Rules of an order of actions in which the arrival of values decides what actors do next."""

from __future__ import annotations

from collections.abc import Iterator

from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceChoice
from raypar.config.rules import Conflict, RunRule, RunSetting
from raypar.config.validate.settings import DYNAMIC, OFFLOADED_WEIGHTS, SHARDED_WEIGHTS

_ROWS = "but {other}, and weights come for use in the order of the rows"
_COMPILED = RunSetting("executor", "compiled", undo="set executor to 'tasks'")
_BY_THEMSELVES = "but {other}, and its actors follow their rows by themselves"


def order_on(run: Run, device: DeviceChoice) -> Iterator[str]:
    """Yield a fault if messages on a device have no tags, so that they must come in the order of the rows.

    Args:
        run: The run.
        device: The device, as far as it is known.
    """
    if run.order == "dynamic" and device == "cuda":
        yield f"order is 'dynamic', but messages of NCCL have no tags on GPUs: {DYNAMIC.without}, or device to 'cpu'"


ORDER_RULES: tuple[RunRule, ...] = (
    Conflict(DYNAMIC, _COMPILED, _BY_THEMSELVES, "set executor to 'tasks', or order to 'row'"),
    Conflict(DYNAMIC, SHARDED_WEIGHTS, _ROWS, DYNAMIC.undo),
    Conflict(DYNAMIC, OFFLOADED_WEIGHTS, _ROWS, DYNAMIC.undo),
    lambda examined: order_on(examined.run, examined.run.device),
)
