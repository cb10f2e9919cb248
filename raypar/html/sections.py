"""The sections of a report; one without data says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raypar.config import Run
from raypar.folder.read import Past
from raypar.html.charts import Line, bars, line_chart
from raypar.html.figures import History, flat, share, significant, size
from raypar.html.markup import Markup, element, joined
from raypar.schedules.measure import costs_of
from raypar.schedules.overlay import Overlay
from raypar.schedules.simulate import simulate
from raypar.toml import plain_of

_NUMBER = "number"
_VALUE = "value"


def losses(history: History) -> Markup:
    """Train and validation loss over steps."""
    lines = [Line("train", history.points("loss"))]
    if history.evaluations:
        lines.append(Line("validation", history.validation(), "two"))
    return _section(
        "Loss", line_chart(lines, significant, broad=True) if history.steps else _note("No step was taken yet.")
    )


def speed(history: History) -> Markup:
    """Tokens a second and the bubble over steps, side by side where there is room."""
    if not history.steps:
        return _section("Speed", _note("No step was taken yet."))
    tokens = line_chart([Line("tokens/s", history.points("tokens_per_s"))], significant, zero=True)
    bubble = line_chart([Line("bubble", history.points("bubble"))], share, zero=True)
    return element("div", _section("Tokens/s", tokens), _section("Bubble", bubble), class_="pair")


def steps(past: Past) -> Markup:
    """The latest measured step over its prediction."""
    title = "Measured over predicted"
    if not past.timelines or not past.timelines[0].events:
        return _section(title, _note("No step was measured."))
    measured = past.timelines[0]
    overlay = Overlay(measured, simulate(measured.schedule, costs_of(measured)))
    which = f" of replica {measured.events[0].actor}" if len(past.timelines) > 1 else ""
    note = _note(
        f"Step {past.step}{which}. Predicted with the median costs of its own actions: what differs is waiting that "
        "the schedule does not ask for. Point at a box for its times; raypar trace writes all of them for Perfetto."
    )
    return _section(title, element("div", Markup(overlay.svg()), class_="wide"), note)


def memory(history: History) -> Markup:
    """The peak of every pipeline rank."""
    peaks = [(f"pp={rank}", float(peak)) for rank, peak in enumerate(history.peaks())]
    return _section("Peak memory", bars(peaks, size) if peaks else _note("No step was taken yet."))


def messages(past: Past) -> Markup:
    """The ledger: what every actor moved."""
    rows = [
        [actor, kind, f"{calls:,}", size(count)]
        for actor, table in past.ledger.items()
        for kind, (calls, count) in table.items()
    ]
    table = _table(["actor", "axis and operation", "calls", "bytes"], rows, ["", "", _NUMBER, _NUMBER])
    return _section("Messages", table if rows else _note("Nothing was moved between actors, or it was not written."))


def checkpoints(past: Past) -> Markup:
    """The checkpoints that the folder has."""
    rows = [
        [one.path.name, f"{one.step:,}", f"{one.tensors:,}", size(one.size), "; ".join(one.faults) or "sound"]
        for one in past.checkpoints
    ]
    heads = ["checkpoint", "step", "tensors", "bytes", "manifest"]
    table = _table(heads, rows, [_VALUE, _NUMBER, _NUMBER, _NUMBER, ""])
    return _section("Checkpoints", table if rows else _note("None."))


def configuration(past: Past) -> Markup:
    """Every setting of the run; those that are not the default of a Run are marked."""
    usual = flat(plain_of(Run()))
    rows = [
        [key, element("mark", str(value)) if key not in usual or usual[key] != value else str(value)]
        for key, value in flat(past.config).items()
    ]
    note = _note(joined(element("mark", "marked"), ": not the default."))
    return _section("Configuration", _table(["setting", "value"], rows, ["", _VALUE]), note)


def _section(title: str, *inside: Markup) -> Markup:
    return element("section", element("h2", title), *inside)


def _note(text: str) -> Markup:
    return element("p", text, class_="note")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], kinds: Sequence[str]) -> Markup:
    """A table; ``kinds`` are the classes of its columns."""
    head = element("tr", *(element("th", name, class_=kind or None) for name, kind in zip(heads, kinds, strict=True)))
    body = [
        element("tr", *(element("td", cell, class_=kind or None) for cell, kind in zip(row, kinds, strict=True)))
        for row in rows
    ]
    return element("div", element("table", head, *body), style="overflow-x: auto")
