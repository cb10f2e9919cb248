"""The cause of a failed backward: the layer, and the line of the user's code whose gradient failed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from raypar.actors.errors import is_ours

_FRAME = re.compile(
    r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)\n(?:    (?P<code>.+)\n)?', re.MULTILINE
)


def called_as(name: str, module: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with this name that calls a layer, so that the name appears in tracebacks."""

    def call(*values: Any) -> Any:
        return module(*values)

    return FunctionType(call.__code__.replace(co_name=name), globals(), name, None, call.__closure__)


def forward_of_fault(again: Callable[[], object], names: Sequence[str]) -> str:
    """Repeat a forward and its failing backward, and return the line and the layer at which the backward fails.

    Args:
        again: Repeats them. It calls the layers by functions that ``called_as`` returned.
        names: The names of these functions.

    Returns:
        Such as "(in layers.1, in the backward of model.py:17: y = x.exp())"; "" if it is unknown.
    """
    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(True, check_nan=False):
        warnings.simplefilter("always")
        with suppress(Exception):  # the fault itself, or one that only anomaly mode finds
            again()
    texts = [str(one.message) for one in caught if "Traceback of forward call" in str(one.message)]
    frames = list(_FRAME.finditer(texts[0])) if texts else []
    entry = next((at for at in range(len(frames) - 1, -1, -1) if _enters(frames[at], names)), len(frames))
    layer = frames[entry]["name"] if entry < len(frames) and frames[entry]["name"] in names else None
    inside = [frame for frame in frames[entry + 1 :] if not is_ours(frame["file"])]
    line = inside[-1] if inside else None  # of the user's code; a layer of torch has none
    where = [] if layer is None else [f"in {layer}"]
    if line is not None:
        where.append(f"in the backward of {Path(line['file']).name}:{line['line']}: {line['code'] or line['name']}")
    return f"({', '.join(where)})" if where else ""


def _enters(frame: re.Match[str], names: Sequence[str]) -> bool:
    """Return whether a frame of a traceback calls a layer or the loss."""
    return frame["name"] in (*names, "loss") and is_ours(frame["file"])
