"""What a report says of the run itself: its circumstances, its samples, and the settings that are not the default."""

from __future__ import annotations

from raypar.actors.specs.model import GPT
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.run import Run
from raypar.config.toml import plain_of
from raypar.reporting.html.about import circumstances, configuration, samples
from raypar.reporting.html.page import page
from raypar.reporting.run_folder.provenance import provenance_of_process
from tests.raypar.reporting.html.test_report import EVIL, Reader, past, report


def test_the_head_says_when_on_what_and_with_what():
    known = {"raypar": "0.1", "torch": "2.9", "host": "h", "hardware": "2 cores", "started": "2026-11-24T09:54:26+00"}
    reported = "2026-11-24 09:54 \u00b7 h \u00b7 2 cores \u00b7 raypar 0.1, torch 2.9"
    assert circumstances(past(provenance=known)) == reported
    assert reported in Reader(page(past(provenance=known))).texts
    assert circumstances(past(provenance={})) == ""


def test_provenance_has_the_hardware():
    from datetime import datetime

    assert " cores" in provenance_of_process(datetime.now().astimezone())["hardware"]


def test_samples_are_shown_the_latest_first_and_escaped():
    head = "2026-11-24T09:54:26+0000 INFO sample after step"
    log = [
        f"{head} 1: 'a \\'b' > \"it's\\n<b>\"",
        f"{head} 1,0: x",
        f"{head} 2: [1, 2] > [3]",
        f"{head} 3: {EVIL!r} > ''",
    ]
    read = Reader(str(samples(past(log=log))))
    assert [text for text in read.texts if text.startswith("after")] == ["after step 3", "after step 2", "after step 1"]
    assert {"a 'b", "it's\n<b>", "[1, 2]", "[3]", EVIL} <= set(read.texts)
    assert "script" not in read.tags
    assert samples(past(log=[])) == ""


def test_the_configuration_is_folded_to_what_was_changed():
    read = Reader(str(configuration(past(config=plain_of(Run(steps=4, model=GPT(moe=MoE(experts=8))))))))
    shown = read.texts[: next(n for n, text in enumerate(read.texts) if text.startswith("All "))]
    assert shown[shown.index("value") + 1 :] == ["model.moe.experts", "8", "steps", "4"]
    assert {"optim.lr", "model.moe.top_k"} <= set(read.texts)
    assert "It could not be read." in Reader(str(configuration(past(config={})))).texts


def test_a_chart_has_the_axes_of_its_run_and_its_figures():
    read = Reader(page(past(metrics=[report(0), report(1)])))
    (axes,) = (value for name, value in read.attributes if name == "data-axes")
    assert (
        axes
        == '[{"unit": "tokens", "step": [0, 1, 2, 2], "seen": [0, 4096, 8192, 8192], "time": [0.0, 1.6, 3.2, 3.2]}]'
    )
    assert [value for name, value in read.attributes if name == "value"] == ["step", "seen", "time"]


def test_a_run_without_a_step_has_axes_of_nothing():
    (axes,) = (value for name, value in Reader(page(past(metrics=[]))).attributes if name == "data-axes")
    assert axes == '[{"unit": "tokens"}]'
