"""A calibration with simple numbers, as raypar calibrate would write it."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version

from raypar.actors.machine.host_cores import num_cores
from raypar.planner.calibrated.calibration import (
    FORMAT,
    AttentionTime,
    Beside,
    Calibration,
    GroupTime,
    MeasuredProduct,
    MeasuredUpdate,
    Origin,
)

RATE = 1e10  # multiplications a second


def known(**changed):
    """A machine with simple numbers."""
    products = tuple(
        MeasuredProduct(m, k, n, m * k * n / RATE, 2 * m * k * n / RATE)
        for m in (32, 512)
        for k in (64, 256)
        for n in (64, 256)
    )
    found = Calibration(
        format=FORMAT,
        origin=Origin(
            "here", "a processor", num_cores(), 1, "2026-11-26T12:00:00+00:00", 50.0, {"torch": version("torch")}
        ),
        device="cpu",
        threads=1,
        products=products,
        attention=(AttentionTime(64, 8, 32, 1e-3, 2e-3),),
        memory=1e10,
        besides=(Beside("gpt", 1 << 10, 1e-3, 2e-3), Beside("gpt", 1 << 13, 2e-3, 4e-3)),
        action_forward=1e-4,
        action_backward=2e-4,
        update=MeasuredUpdate(1e-3, 1e-5, 1e-9),
        groups=tuple(
            GroupTime("all_reduce", 2, 1, count, 1e-4 + count * 1e-9) for count in (4 << 10, 1 << 20, 8 << 20)
        ),
        busy=1.0,
        message=0.0,
        call=5e-4,
        process=300 << 20,
    )
    return replace(found, **changed)
