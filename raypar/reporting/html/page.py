"""The HTML page of a run's report, with one function for each section."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from raypar.actors.specs.run import Run
from raypar.config.toml import plain_of
from raypar.reporting.html.charts import Line, bars, line_chart
from raypar.reporting.html.figures import History, flat, headline, share, significant, size
from raypar.reporting.html.markup import STYLE, Markup, element, joined
from raypar.reporting.run_folder.read import Past
from raypar.schedules.drawing.overlay import Overlay
from raypar.schedules.simulation.measured_costs import costs_of
from raypar.schedules.simulation.simulate import simulate

_NUMBER = "number"
_VALUE = "value"


def losses(history: History) -> Markup:
    """Draw train and validation loss over steps."""
    lines = [Line("train", history.points("loss"))]
    if history.evaluations:
        lines.append(Line("validation", history.validation(), "two"))
    return _section(
        "Loss", line_chart(lines, significant, broad=True) if history.steps else _note("No step was taken yet.")
    )


def speed(history: History) -> Markup:
    """Draw tokens a second and the bubble over steps, side by side if there is room."""
    if not history.steps:
        return _section("Speed", _note("No step was taken yet."))
    tokens = line_chart([Line("tokens/s", history.points("tokens_per_s"))], significant, zero=True)
    bubble = line_chart([Line("bubble", history.points("bubble"))], share, zero=True)
    return element("div", _section("Tokens/s", tokens), _section("Bubble", bubble), class_="pair")


def steps(past: Past) -> Markup:
    """Draw the latest measured step over its prediction, which is simulated with the step's own median costs."""
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
    """Draw the peak memory of every pipeline rank."""
    peaks = [(f"pp={rank}", float(peak)) for rank, peak in enumerate(history.peaks())]
    return _section("Peak memory", bars(peaks, size) if peaks else _note("No step was taken yet."))


def messages(past: Past) -> Markup:
    """List the ledger: the calls and bytes of every actor."""
    rows = [
        [actor, kind, f"{calls:,}", size(count)]
        for actor, table in past.ledger.items()
        for kind, (calls, count) in table.items()
    ]
    table = _table(["actor", "axis and operation", "calls", "bytes"], rows, ["", "", _NUMBER, _NUMBER])
    return _section("Messages", table if rows else _note("Nothing was moved between actors, or it was not written."))


def checkpoints(past: Past) -> Markup:
    """List the checkpoints of the folder."""
    rows = [
        [one.path.name, f"{one.step:,}", f"{one.tensors:,}", size(one.size), "; ".join(one.faults) or "sound"]
        for one in past.checkpoints
    ]
    heads = ["checkpoint", "step", "tensors", "bytes", "manifest"]
    table = _table(heads, rows, [_VALUE, _NUMBER, _NUMBER, _NUMBER, ""])
    return _section("Checkpoints", table if rows else _note("None."))


def configuration(past: Past) -> Markup:
    """List every setting of the run, and mark those that differ from the defaults of a Run."""
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
    """Make a table; ``kinds`` are the CSS classes of its columns."""
    head = element("tr", *(element("th", name, class_=kind or None) for name, kind in zip(heads, kinds, strict=True)))
    body = [
        element("tr", *(element("td", cell, class_=kind or None) for cell, kind in zip(row, kinds, strict=True)))
        for row in rows
    ]
    return element("div", element("table", head, *body), style="overflow-x: auto")


def page(past: Past) -> str:
    """Make the HTML page of a run folder.

    Args:
        past: The content of the run folder.

    Returns:
        The HTML.
    """
    history = History.of(past)
    title = ", ".join([_model(past.config), *([past.schedule.name] if past.schedule else [])])
    tiles = [
        element("div", element("b", value), element("span", name), class_="tile")
        for name, value in headline(past, history)
    ]
    body = element(
        "body",
        element("header", element("h1", title), element("p", f"raypar run in {past.folder}")),
        element("div", *tiles, class_="tiles"),
        losses(history),
        speed(history),
        steps(past),
        memory(history),
        messages(past),
        checkpoints(past),
        configuration(past),
    )
    head = element(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", f"{past.folder.name}: {title}"),
        element("style", STYLE),
    )
    return joined(Markup("<!DOCTYPE html>\n"), element("html", head, body, lang="en"), Markup("\n"))


def _model(config: dict[str, Any]) -> str:
    """Describe the model and its mesh in a few words."""
    model, mesh = config["model"], config["mesh"]
    names = [f"{model[name]} {name}" for name in ("layers", "hidden") if isinstance(model.get(name), int)]
    axes = [f"{axis}={size}" for axis, size in mesh.items() if size != 1]
    kind = "Llama" if model.get("kind") == "llama" else "GPT"
    what = f"{kind} of {names[0]}, {', '.join(names[1:])}" if names else "a model of the user's own layers"
    return f"{what} on {' '.join(axes) or 'one actor'}"
