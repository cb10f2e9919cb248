"""Every device that a report knows by name has a peak, and one of its own is what the planner has."""

from __future__ import annotations

from typing import get_args

import pytest

from raypar.planner.hardware.data_sheets import DEVICES
from raypar.planner.hardware.peak_flops import DeviceName, data_sheet_of, peak_of, peak_of_gpu


def test_every_name_has_a_peak():
    peaks = {name: peak_of(name) for name in get_args(DeviceName)}
    assert all(1e13 < peak < 1e16 for peak in peaks.values())
    assert peaks["a100"] == DEVICES["a100"].half
    assert peak_of(5e12) == 5e12
    assert peak_of(None) is None


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GB200", None),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A10G", "a10"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("", None),
    ],
)
def test_a_gpu_is_known_by_what_torch_calls_it(gpu, name):
    assert data_sheet_of(gpu) == name


def test_a_peak_is_that_of_the_dtype():
    assert peak_of_gpu("NVIDIA H100 80GB HBM3", "bf16") == 989.4e12
    assert peak_of_gpu("NVIDIA H100 80GB HBM3", "fp32") == 66.9e12
    assert peak_of_gpu("Tesla T4", "fp32") is None and peak_of_gpu("Tesla T4", "fp16") == 65e12
