"""examples/tour.ipynb runs from its first cell to its last, and has the outputs of such an execution.

What executes it is part of `make test-browser`, beside the pages that people look at, and of `make test-long`.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from tests.support.notebooks import executed, page_of

TOUR = Path(__file__).parents[2] / "examples" / "tour.ipynb"
FIGURE = re.compile(r"-?\d[\d,.]*(e-?\d+)?")  # times, losses and memory are not those of another machine
ANSWERS = """\
> what is a bubble?
 time in which an actor waits.
> what is 1f1b?
 one forward, one backward, in turns.
> who are you?
 a small model, trained by ray actors.
"""


@pytest.fixture(scope="module")
def tour():
    """The notebook, executed now."""
    return executed(TOUR)


def outputs_of(notebook):
    """[(source of a cell, {what its outputs show, by kind})] of the cells with code."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            shown = {}
            for output in cell.outputs:
                if output.output_type == "stream":
                    shown[output.name] = shown.get(output.name, "") + output.text
                elif output.output_type == "error":
                    shown["error"] = "\n".join(output.traceback)
                else:
                    shown |= {f"{output.output_type} {kind}": text for kind, text in output.data.items()}
            found.append((cell.source, shown))
    return found


@pytest.mark.long
def test_its_outputs_are_those_of_an_execution(tour):
    for (source, kept), (_, shown) in zip(outputs_of(nbformat.read(TOUR, 4)), outputs_of(tour), strict=True):
        assert kept.keys() == shown.keys(), source
        for kind in ("error", "execute_result text/plain"):
            if kind in kept and "rank 0 measured" not in kept[kind] and "Text(path=" not in kept[kind]:
                then, now = (" ".join(FIGURE.sub("#", text[kind]).split()) for text in (kept, shown))
                assert then == now, source


@pytest.mark.long
def test_nothing_is_red_and_all_draws_itself(tour):
    shown = dict(outputs_of(tour))
    assert not [source for source, kinds in shown.items() if "stderr" in kinds]
    training = shown["reports = job.train(steps=70)"]["display_data text/html"]
    assert "<b>70/70</b>" in training and "width: 100.0%" in training and training.count("<svg") == 1
    for move in ('s.do("0F3")', 's.swap("1f1b")', "s.finish()", "job.step()\njob.overlay()"):
        assert "<svg" in shown[move]["execute_result text/html"], move
    refused = [kinds["error"] for kinds in shown.values() if "error" in kinds]
    assert len(refused) == 2 and all(len(text.splitlines()) <= 4 for text in refused), "no traceback"
    assert next(kinds["stdout"] for source, kinds in shown.items() if source.startswith("def ask")) == ANSWERS
    assert 'data-jp-theme-light="false"' in page_of(tour, "dark")


def test_its_links_lead_somewhere():
    text = "\n".join(cell.source for cell in nbformat.read(TOUR, 4).cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\((\S+?)\)", text)
    assert links
    assert all((TOUR.parent / link).is_file() for link in links)
