"""Overflow in the report: heat maps of layers by steps, with figures at each cell."""

import pytest

from raypar.reporting.html.heat_map import COLUMNS
from raypar.reporting.html.page import page
from raypar.reporting.overflow import LayerCount, Overflow
from raypar.reporting.report import Report
from raypar.reporting.run_folder.read import _metrics
from tests.raypar.reporting.html.test_curves import past
from tests.raypar.reporting.html.test_report import Reader


def lines(steps, over=lambda step: 0, every=1):
    for step in range(steps):
        count = LayerCount("blocks.<0>", "activations", 3, "pp=0 dp=1", 1000, over(step), 0)
        overflow = Overflow("fp16", (count,)) if step % every == 0 else None
        yield Report(step, 2.0, 1.0, 1e-3, 9, 9.0, 9.0, 0.1, None, (1,), (5,), overflow=overflow).to_dict()


def drawn(*args, **kwargs):
    return page(past(metrics=list(lines(*args, **kwargs))))


def test_a_run_without_counts_has_no_such_section():
    assert "Overflow" not in page(past())


def test_a_cell_tells_its_figures():
    html = drawn(5, lambda step: 20 * step, every=2)
    assert html.count('class="cell bad"') == 2
    assert "step 5, blocks.&lt;0&gt;: 8 % overflow (80 of 1,000, most in microbatch 3, on actor pp=0 dp=1)" in html
    assert "Nothing underflows." in Reader(html).texts


def test_many_steps_share_columns_and_the_worst_is_seen():
    html = drawn(10 * COLUMNS, lambda step: 500 * (step == 123))
    assert html.count('class="cell bad"') == 1
    assert f'viewBox="0 0 {COLUMNS} 1"' in html
    assert "step 124, " in html


@pytest.mark.parametrize("damage", ['"over": -1', '"over": "many"'])
def test_damaged_counts_are_faults(damage):
    import json

    raw = json.dumps(next(lines(1))) + "\n"
    assert _metrics(raw.encode())
    with pytest.raises(Exception, match="layers"):
        _metrics(raw.replace('"over": 0', damage).encode())
