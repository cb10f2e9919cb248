"""Experts in the report: curves of auxiliary losses and of the load, and maps of the load of each expert."""

from dataclasses import replace

import pytest

from raypar.actors.specs.results import ExpertLoad
from raypar.reporting.experts import Loads
from raypar.reporting.html.compare import comparison
from raypar.reporting.html.page import page
from raypar.reporting.report import Report
from tests.raypar.reporting.html.test_curves import past
from tests.raypar.reporting.html.test_report import Reader

PLAIN = Report(0, 2.0, 1.0, 1e-3, 9, 9.0, 9.0, 0.1, None, (1,), (5,))


def lines(steps=3, experts=4, layers=2, dropped=0):
    asked = (3, 0, *[1] * (experts - 2))
    for step in range(steps):
        loads = tuple(ExpertLoad(f"blocks.{n}.<mlp>", asked, (dropped, *[0] * (experts - 1))) for n in range(layers))
        aux = {"switch": {"blocks.0.mlp": 0.01, "blocks.1.mlp": 0.03}}
        yield replace(PLAIN, step=step, aux_by_layer=aux, loads=Loads(loads)).to_dict()


def drawn(**changes):
    return page(past(metrics=list(lines(**changes))))


def test_a_run_without_experts_has_no_such_sections():
    html = page(past(metrics=[PLAIN.to_dict()]))
    assert not any(title in html for title in ("Auxiliary losses", "Load of", "dropped"))


def test_the_load_of_each_expert_is_at_its_cell():
    html = drawn()
    assert "step 2, 0: 2.40 x the mean (3 choices)" in html
    assert html.count('class="cell one"') == 2 * 3 * 3, "an expert that nobody chose is left blank"
    texts = Reader(html).texts
    assert "blocks.1.<mlp>: max/mean 2.40 (median)" in texts
    assert "max/mean load, median" in texts
    assert "Choices dropped" not in texts


def test_drops_are_a_curve_and_a_map_by_layer():
    html = drawn(dropped=1)
    assert "step 1, 0: 2.40 x the mean (3 choices, 1 of them dropped)" in html
    assert "step 1, blocks.0.&lt;mlp&gt;: 20 % dropped" in html
    assert "Choices dropped" in Reader(html).texts


def test_steps_whose_tokens_were_not_written_are_left_out_of_the_maps():
    made = list(lines(4))
    html = page(past(metrics=[line | {"loads": None} if line["step"] % 2 else line for line in made]))
    assert html.count('class="cell one"') == 2 * 2 * 3
    assert "step 4: smoothed 2.4, every step 2.4" in Reader(html).tips


@pytest.mark.long
def test_of_many_layers_and_experts_the_page_stays_small():
    html = drawn(steps=80, experts=64, layers=40)
    assert len(html) < 4_000_000
    texts = Reader(html).texts
    assert any("Left out: the 25 layers whose load is the most even" in text for text in texts)
    assert "9 more layers" in texts


def test_runs_with_experts_are_compared_with_others():
    texts = Reader(comparison([past(metrics=list(lines())), past(metrics=[PLAIN.to_dict()])])).texts
    assert {"Auxiliary losses, smoothed", "Load of experts: max/mean", "max/mean load, median"} <= set(texts)
    assert "Choices dropped" not in texts
