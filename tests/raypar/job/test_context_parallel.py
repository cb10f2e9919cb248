"""Sequences divided over real actors: verified against one plain process with dropout, looked into, stepped, saved."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch

import raypar as rp
from tests.support.thinned import thinned

pytestmark = pytest.mark.usefixtures("plain_once")


def tiny(**changes):
    run = rp.recipe("gpt-tiny")
    assert run.model.dropout > 0, "its masks must not depend on the layout"
    return replace(run, **{"mesh": rp.Mesh(cp=2), "steps": 3, "data": rp.Text(argparse.__file__)} | changes)


@pytest.mark.parametrize("context", thinned(["ring", "all_gather", "ulysses", "rsa"], lambda one: one == "ring"))
def test_it_is_one_plain_process_within_the_bounds(job_on, context):
    verdict = rp.verify(tiny(context=context), job_on(2))
    assert verdict.ok, str(verdict)
    assert not verdict.bitwise


@pytest.mark.long
@pytest.mark.long
def test_recomputed_and_stepped_by_hand_it_has_the_same_bits(job_of):
    run = tiny(recompute="selective")
    job = job_of(run)
    compiled = [job.step() for _ in range(2)]
    job.reset(replace(run, recompute="none"))
    for wanted in compiled:
        stepper = job.stepper()
        looks = []
        stepper.break_on(looks.append)
        stepper.next()
        assert [look.actor for look in looks] == ["pp=0 cp=0", "pp=0 cp=1"], "what is not finite may be at any actor"
        seen = stepper.peek("0F0", cp=1)
        assert seen.actor == "pp=0 cp=1"
        assert not torch.equal(seen.tensor, stepper.peek("0F0").tensor), "each has the loss of its tokens"
        stepper.break_on(None)
        stepper.rewind()
        assert stepper.finish().loss == wanted.loss
        assert seen.finite


@pytest.mark.long
def test_the_driver_sees_whole_weights(job_of, tmp_path):
    job = job_of(tiny())
    job.train(1)
    assert torch.equal(job.param("head.out.weight"), dict(job.weights())["head.out.weight"])
    assert list(job.ledger()) == ["pp=0 cp=0", "pp=0 cp=1"]
    assert len(list(job.save(tmp_path).glob("*.safetensors"))) == 2, "each its part of the optimizer"
    job.reset(tiny(zero=0))
    assert len(list(job.save(tmp_path / "whole").glob("*.safetensors"))) == 1, "of equal replicas one writes"
