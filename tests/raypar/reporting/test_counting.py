"""Steps are counted from 1 wherever a person reads, and files say which number they give."""

from __future__ import annotations

from dataclasses import replace

from raypar.actors.in_brief import in_brief
from raypar.actors.specs.model import GPT, Layers
from raypar.actors.specs.moe import MoE
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.report import Report
from raypar.reporting.trackers.tracker import scalars

FIRST = Report(0, 2.5, 1.0, 1e-3, 256, 1e3, 256.0, 0.2, None, (2, 1), (5, 6))
AFTER = Evaluation(1, 2.0, 64, 0.5)


def test_a_person_reads_step_1_first():
    assert repr(FIRST) == (
        "<Report of step 1: loss 2.5000, gradient norm 1, learning rate 0.001, tokens/s 1,000, time 256.0 ms, "
        "bubble 20.0%, peak memory 6 B>"
    )
    assert "gradient norm 0," in repr(replace(FIRST, grad_norm=0.0))
    assert repr(replace(FIRST, skipped=True, loss=None)).startswith("<Report of step 1: skipped, loss ")
    assert (
        repr(AFTER)
        == "<Evaluation after step 1: cross-entropy 2.0 nats, perplexity 7.38905609893065, 64 targets, 0.5 s>"
    )
    own = repr(replace(AFTER, is_cross_entropy=False))
    assert own == "<Evaluation after step 1: mean of the model's loss 2.0, 64 targets, 0.5 s>"
    images = replace(AFTER, of_tokens=False)
    assert repr(images) == "<Evaluation after step 1: cross-entropy 2.0 nats, 64 targets, 0.5 s>"
    assert images.to_dict()["perplexity"] is None


def test_a_program_reads_both_numbers():
    assert (FIRST.step, FIRST.steps_taken, AFTER.step, AFTER.steps_taken) == (0, 1, 1, 1)
    assert [(line["step"], line["steps_taken"]) for line in (FIRST.to_dict(), AFTER.to_dict())] == [(0, 1), (1, 1)]
    assert "steps_taken" not in scalars(FIRST.to_dict()), "a tracker has it as its axis"


def test_a_model_is_told_by_its_sizes_and_what_is_not_its_default():
    reported = in_brief(GPT(hidden=32, heads=4, moe=MoE(experts=8)))
    assert reported.startswith("GPT(layers=8, hidden=32, heads=4, seq=256, ")
    assert "moe=MoE(experts=8, " in reported
    assert not any(usual in reported for usual in ("dropout", "rope_base", "kind", "attention", "None"))
    assert in_brief(Layers(list, len)).startswith("Layers(fn=list, loss=len")
    assert "plan" not in in_brief(Layers(list, len))
    assert "plan={'a': 'row'}" in in_brief(Layers(list, print, plan={"a": "row"}))
