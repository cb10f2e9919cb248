"""The learning rate of every step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypar.actors.optim.lr import lr_at
from raypar.actors.optim.optimizer import build_optimizer, set_lr
from raypar.actors.specs.optim import SGD, AdamW, Muon


def rates(spec, steps):
    return [lr_at(spec, step, steps) for step in range(steps)]


def test_constant_is_constant():
    assert rates(SGD(lr=0.5), 4) == [0.5] * 4


def test_warm_up_is_linear_and_ends_at_the_peak():
    assert rates(AdamW(lr=8.0, warmup=4), 6) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_linear_decay_reaches_its_end_behind_the_last_step_or_at_it():
    spec = AdamW(lr=1.0, decay="linear", final=0.5)
    assert rates(spec, 4) == [1.0, 0.875, 0.75, 0.625]
    assert rates(replace(spec, decay_end="last"), 5) == [1.0, 0.875, 0.75, 0.625, 0.5]


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_decays_to_zero_are_those_of_transformers(decay, warmup):
    """Whose warm-up begins at 0: a step of it has the rate of raypar's step before."""
    optimization = pytest.importorskip("transformers.optimization")
    make = getattr(optimization, f"get_{decay}_schedule_with_warmup")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    schedule, theirs = make(optimizer, warmup, 10), []
    for _ in range(10):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    ours = rates(SGD(lr=0.5, decay=decay, warmup=warmup, final=0.0), 10)
    assert ours[warmup:] == pytest.approx(theirs[warmup:])
    assert ours[:warmup] == pytest.approx(theirs[1 : warmup + 1])
    assert ours[-1] > 0, "the last step learns"


def test_cosine_is_half_way_in_the_middle():
    found = rates(AdamW(lr=1.0, decay="cosine", final=0.0), 4)
    assert found == pytest.approx([(1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)])


def test_wsd_stays_and_goes_down_in_the_last_steps():
    spec = AdamW(lr=1.0, warmup=2, decay="wsd", decay_steps=3, final=0.0)
    assert rates(spec, 9) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    tenth = replace(spec, decay_steps=None, warmup=0)
    assert [rate for rate in rates(tenth, 20) if rate < 1] == pytest.approx([2 / 3, 1 / 3])
    last = replace(spec, decay_steps=4, decay_end="last")
    assert rates(last, 10) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_wsd_may_go_down_by_one_minus_the_root():
    found = rates(SGD(lr=1.0, decay="wsd", decay_steps=3, decay_form="sqrt", final=0.2), 5)
    assert found == pytest.approx([1.0, 1.0, 0.6, 0.2 + 0.8 * (1 - math.sqrt(0.5)), 0.2 + 0.8 * (1 - math.sqrt(0.75))])


def test_wsd_goes_down_after_the_warm_up_if_the_run_is_shorter():
    assert rates(SGD(lr=1.0, warmup=2, decay="wsd", decay_steps=100, final=0.0), 4) == [0.5, 1.0, 1.0, 0.5]
    assert rates(SGD(lr=1.0, decay="wsd"), 1) == [1.0]


def test_the_stable_rates_of_wsd_do_not_depend_on_the_length_of_the_run():
    """So that a run can be resumed for longer from a checkpoint of before its decay."""
    spec = AdamW(lr=0.3, warmup=3, decay="wsd", decay_steps=5)
    assert rates(spec, 20)[:15] == rates(spec, 50)[:15]


@given(
    st.integers(0, 30),
    st.integers(1, 40),
    st.sampled_from(["constant", "cosine", "linear", "wsd"]),
    st.floats(0, 1),
    st.integers(0, 90),
    st.sampled_from(["after", "last"]),
)
def test_any_rate_lies_between_zero_and_the_peak_and_decay_never_rises(warmup, steps, decay, final, step, end):
    spec = AdamW(lr=2.0, warmup=warmup, decay=decay, final=final, decay_end=end)
    now, later = lr_at(spec, step, steps), lr_at(spec, step + 1, steps)
    assert 0 <= now <= 2.0
    if step >= warmup:
        assert later <= now
        assert now >= 2.0 * final - 1e-12
    else:
        assert later >= now
    if step >= max(steps, warmup + 1) and decay != "constant":
        assert now == pytest.approx(2.0 * final), "past the end it stays"


@pytest.mark.parametrize(
    "spec", [AdamW(lr=0.1, weight_decay=0.5), SGD(lr=0.1, weight_decay=0.5), Muon(lr=0.1, weight_decay=0.5)]
)
def test_only_tensors_of_two_dims_decay(spec):
    parameters = {"w": torch.nn.Parameter(torch.ones(2, 2)), "b": torch.nn.Parameter(torch.ones(2))}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(spec, parameters)
    set_lr(optimizer, 0.2)
    optimizer.step()
    assert torch.allclose(parameters["w"], torch.full((2, 2), 0.9))  # 1 - lr * decay
    assert torch.equal(parameters["b"], torch.ones(2))


def test_no_parameters_no_optimizer():
    assert build_optimizer(AdamW(), {}) is None
