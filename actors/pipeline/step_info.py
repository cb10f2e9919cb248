"""The step and the microbatch that the user's layers and losses are computed for: ``rp.step_info``.

A stage sets it before each layer, also when a layer is computed again for a backward.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class StepInfo(NamedTuple):
    """What a layer or a loss is computed for.

    All fields but ``trains`` are None outside of a run's steps, as when text is generated.
    """

    step: int | None = None
    """the step, counted from 0"""
    microbatch: int | None = None
    """number of the microbatch in the whole step, over all replicas: of replica r's microbatch m, m * replicas + r"""
    trains: bool = False
    """whether the step trains; False in evaluations"""


class _Present(threading.local):
    info = StepInfo()


_present = _Present()


def step_info() -> StepInfo:
    """Return the step and the microbatch that this thread computes, for a layer's ``forward`` and for a loss.

    A layer that is computed again for a backward (``recompute``) finds what it found in its forward.
    """
    return _present.info


def set_step_info(info: StepInfo) -> None:
    """Set what the code that this thread calls next is computed for."""
    _present.info = info


@contextmanager
def in_step(info: StepInfo) -> Iterator[None]:
    """Return a context around code that is computed for a microbatch."""
    before = _present.info
    _present.info = info
    try:
        yield
    finally:
        _present.info = before
