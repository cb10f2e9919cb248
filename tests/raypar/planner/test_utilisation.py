"""MFU and HFU of a run's steps, where data sheets have the peak of its GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

import raypar as rp
from raypar.planner.formulas import hfu, mfu
from raypar.planner.utilisation import utilisation_of

MODEL = rp.GPT(layers=4, hidden=256, heads=4, seq=128, vocab=1000, attention="materialised")
RUN = rp.Run(model=MODEL, precision=rp.Precision("bf16"))
H100 = "NVIDIA H100 80GB HBM3"
TWO = [(H100, "a"), (H100, "b")]


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_it_is_that_of_the_formulas(recompute):
    found = utilisation_of(replace(RUN, recompute=recompute), TWO)
    sizes = 1000 * 128 / 2.0, 989.4e12, 4, 256, 128, 1000, 2  # tokens/s of 1000 samples in 2 s
    assert found.mfu(1000, 2.0) == pytest.approx(mfu(*sizes), rel=0.001)
    assert found.hfu(1000, 2.0) == pytest.approx(hfu(*sizes, recomputed=recompute), rel=0.001)
    assert (found.hfu(1, 1.0) > found.mfu(1, 1.0)) == (recompute == "selective")


def test_what_is_recomputed_counts_as_another_forward():
    found = utilisation_of(replace(RUN, recompute="full"), TWO)
    assert found.hardware == pytest.approx(4 / 3 * found.model)
    half = utilisation_of(replace(RUN, recompute=("full", "none", "full", "none")), TWO)
    assert found.model == half.model < half.hardware < found.hardware


def test_a_gpu_that_actors_share_counts_once_and_fp32_has_a_lower_peak():
    one, two = utilisation_of(RUN, [(H100, "a")] * 2), utilisation_of(RUN, TWO)
    assert one.model == pytest.approx(2 * two.model)
    plain = utilisation_of(replace(RUN, precision=rp.Precision("fp32")), TWO)
    assert plain.model == pytest.approx(two.model * 989.4 / 66.9)


def test_frozen_weights_need_no_gradients():
    adapted = utilisation_of(replace(RUN, model=replace(MODEL, lora=rp.Lora(rank=2))), TWO)
    assert 2 / 3 < adapted.model / utilisation_of(RUN, TWO).model < 0.75


def test_it_is_left_out_where_it_is_not_known():
    assert utilisation_of(RUN, [("", "")] * 2) is None, "of CPUs"
    assert utilisation_of(RUN, [(H100, "a"), ("NVIDIA H100 NVL", "b")]) is None
    assert utilisation_of(RUN, []) is None
    assert utilisation_of(replace(RUN, model=rp.Layers(list, loss=print)), TWO) is None
