"""Every device that a report knows by name has a peak, and one of its own is what the planner has."""

from __future__ import annotations

from typing import get_args

from raypar.planner.hardware.data_sheets import DEVICES
from raypar.reporting.html.flops import DeviceName, peak_of


def test_every_name_has_a_peak():
    peaks = {name: peak_of(name) for name in get_args(DeviceName)}
    assert all(1e13 < peak < 1e16 for peak in peaks.values())
    assert peaks["a100"] == DEVICES["a100"].half
    assert peak_of(5e12) == 5e12
    assert peak_of(None) is None
