"""Wrong auxiliary losses, and experts that are summed over the wrong group: verify names them."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch

import raypar as rp
from raypar.actors.data.batches import TokenMean
from raypar.actors.expert_parallel.record import RouterRecord
from raypar.parity.case import Case, Piece
from raypar.parity.causes import cause_of
from tests.support.layouts import verdict_of

SIZES = {"pp": 2, "dp": 3, "ep": 2, "microbatches": 4}
DRAW = torch.Generator().manual_seed(0)
REST, PART, *EXPERTS = (torch.randn(6, 5, generator=DRAW) for _ in range(5))
PART = 1e-3 * PART


def case(ours, wanted, **changes):
    at = {"pp": 0, "dp": 0}
    return Case([Piece("pp=0", at, ours, wanted)], SIZES, backward=True, vectors={}, **changes)


@pytest.mark.parametrize(
    ("r", "says"),
    [
        (0, "without the gradient of the auxiliary losses: attach them to an output that goes on (attach_loss)"),
        (3, "auxiliary losses contribute dp times what they should, and all the rest is right"),
        (1 / 3, "auxiliary losses contribute 1/dp times what they should"),
        (4, "auxiliary losses contribute microbatches times what they should"),
        (2, "auxiliary losses contribute pp or ep times what they should"),
        (-1, "auxiliary losses contribute -1 times what they should"),
        (1, "almost right"),
    ],
)
def test_what_auxiliary_losses_contribute(r, says):
    ours = REST + r * PART + 1e-8 * EXPERTS[0]
    assert cause_of(case(ours, REST + PART, auxiliary=[PART])).startswith(says)


def test_a_gradient_of_auxiliary_losses_alone():
    assert cause_of(case(0 * PART, PART, auxiliary=[PART])).startswith("without the gradient of the auxiliary losses")
    assert cause_of(case(3 * PART, PART, auxiliary=[PART])).startswith("dp times the right one")


def test_another_error_is_not_blamed_on_auxiliary_losses():
    says = cause_of(case(2 * REST + 2 * PART, REST + PART, auxiliary=[PART]))
    assert says == "2 times the right one: a factor is missing, or one too many"


@pytest.mark.parametrize(
    ("r", "says"), [(2, "ep times the right one: summed"), (0.5, "1/ep times the right one: aver")]
)
def test_an_expert_that_is_scaled_by_ep(r, says):
    others = {f"e.experts.{n}.w": [expert] for n, expert in enumerate(EXPERTS[1:], start=1)}
    assert cause_of(case(r * EXPERTS[0], EXPERTS[0], experts=others)).startswith(says)


@pytest.mark.parametrize(
    ("ours", "says"),
    [
        (
            EXPERTS[0] + EXPERTS[2],
            "the gradient of e.experts.2.w is in it: summed over a group whose members have other",
        ),
        (0.5 * (EXPERTS[0] + EXPERTS[1]), "the gradient of e.experts.1.w is in it"),
        (sum(EXPERTS), "the gradient of e.experts.1.w and e.experts.2.w is in it"),
        (EXPERTS[1], "it is the gradient of e.experts.1.w: experts are in the wrong order"),
        (REST, "not a multiple of the right one"),
    ],
)
def test_the_gradient_of_another_expert(ours, says):
    others = {f"e.experts.{n}.w": [expert] for n, expert in enumerate(EXPERTS[1:], start=1)}
    assert cause_of(case(ours, EXPERTS[0], experts=others)).startswith(says)


def test_of_more_experts_than_numbers_nothing_is_concluded():
    others = {f"e.experts.{n}.w": [torch.randn(3)] for n in range(1, 4)}
    assert "experts" not in cause_of(case(torch.randn(3), torch.randn(3), experts=others))


def moe(**changes):
    run = rp.recipe("moe-tiny")
    model = replace(run.model, layers=2, moe=replace(run.model.moe, alpha=0.1))
    text = rp.Text(argparse.__file__)
    return replace(run, **{"model": model, "steps": 1, "data": text, "microbatches": 2, "timeout": 20.0} | changes)


def test_verify_finds_auxiliary_losses_that_are_missing(monkeypatch):
    monkeypatch.setattr(RouterRecord, "_attach", lambda record, x, loss: x)
    verdict = verdict_of(moe(mesh=rp.Mesh(pp=2)))
    assert not verdict.ok
    assert verdict.diagnosis.cause.startswith("without the gradient of the auxiliary losses")
    assert "blocks.0" in verdict.diagnosis.place, "the last block's output comes after its own"


@pytest.mark.long
def test_verify_finds_auxiliary_losses_that_are_not_averaged_over_replicas(monkeypatch):
    monkeypatch.setattr(TokenMean, "auxiliary", lambda mean, scale: scale / mean._num_microbatches)
    verdict = verdict_of(moe(mesh=rp.Mesh(dp=2), microbatches=3))
    assert verdict.diagnosis.cause.startswith("auxiliary losses contribute dp times what they should")


def test_verify_finds_a_loss_scale_that_auxiliary_losses_lack(monkeypatch):
    monkeypatch.setattr(TokenMean, "auxiliary", lambda mean, scale: 1 / mean._num_microbatches)
    verdict = verdict_of(moe(mesh=rp.Mesh(pp=2), loss_scale=rp.LossScale(use="on", init=2.0**10)))
    assert verdict.diagnosis.cause.startswith("without the gradient of the auxiliary losses")


def test_experts_in_parts_may_differ_by_the_order_of_additions():
    """Experts compute the tokens of both replicas together: with one microbatch each nothing else differs."""
    run = rp.recipe("moe-tiny", mesh=rp.Mesh(dp=2, ep=2), microbatches=1, steps=2)
    verdict = verdict_of(replace(run, model=replace(run.model, dropout=0.0, layers=2)))
    assert verdict.ok, str(verdict)
