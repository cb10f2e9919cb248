"""The ops of a step's end do not grow with the number of parameters: on a GPU each is a launch by the host."""

from __future__ import annotations

import pytest

import raypar as rp
from tests.support.dispatched_ops import ops_of_a_step
from tests.support.team import Team

MOST = 60
LAYOUTS = [{"dp": 1}, *({"dp": 2, "zero": level} for level in range(4))]


def counts(layers, dp, precision, clip, zero=None):
    """The ops of the begin, the STEP and the end of a second step."""
    model = rp.GPT(layers=layers, hidden=32, heads=2, seq=8, vocab=256)
    run = rp.Run(
        model=model, mesh=rp.Mesh(dp=dp), zero=zero, precision=rp.Precision(precision), clip=clip, optim=rp.AdamW(),
        microbatches=2, steps=3, timeout=60.0,
    )  # fmt: skip
    team = Team.of(run)
    team.step(0)
    found = ops_of_a_step(team)
    return {name: found[name].kernels.total() for name in ("begin", "STEP", "end")}


@pytest.mark.sampled
@pytest.mark.parametrize("clip", [None, 1e-6])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_end_of_a_step_has_as_many_ops_for_any_number_of_layers(layout, precision, clip):
    check_ends((2, 5), precision=precision, clip=clip, **layout)


@pytest.mark.long
@pytest.mark.parametrize("clip", [None, 1e-6])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_so_it_has_for_many_layers(layout, precision, clip):
    check_ends((2, 8, 32), precision=precision, clip=clip, **layout)


def check_ends(depths, **layout):
    few, *more = (counts(layers, **layout) for layers in depths)
    assert all(few == one for one in more)
    assert 0 < few["STEP"] <= MOST
    assert few["begin"] == few["end"] == 0
