"""The HTML page that compares runs: the settings that differ, then their curves over each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from raypar.config.toml import flat
from raypar.reporting.html.charts import DASHES, ChartLine, axis_buttons, line_chart
from raypar.reporting.html.experts import aux_total
from raypar.reporting.html.figures import History, Points, exp, headline, significant, smoothed
from raypar.reporting.html.half_precision import SCALE, scale_powers
from raypar.reporting.html.markup import (
    BELOW,
    COLORS,
    VALUE,
    concatenated,
    document,
    element,
    html_table,
    note,
    section,
)
from raypar.reporting.html.page import state, titled, unread
from raypar.reporting.run_folder.read import Past
from raypar.schedules.formatting import amount, percentage

_MISSING = "\u2013"


@dataclass(frozen=True)
class _One:
    """A run on the page.

    Attributes:
        name: Its name: of its folder, or the folder's path if others have that name.
        past: The content of its folder.
        history: Its steps and evaluations.
        color: Its colour.
    """

    name: str
    past: Past
    history: History
    color: str

    def tag(self) -> Markup:
        """Return its name beside a stroke of its colour."""
        return element("span", element("span", element("i"), class_=self.color), self.name, class_="key")


def comparison(pasts: Sequence[Past], *, faults: Sequence[str] = (), every: int | None = None) -> str:
    """Make the HTML page that compares runs.

    Args:
        pasts: The contents of their folders, at least one.
        faults: What could not be read of them.
        every: Seconds after which a page that is served loads itself again while one of them goes on; None for a file.

    Returns:
        The HTML.
    """
    names = [past.folder.name for past in pasts]
    runs = [
        _One(name if names.count(name) == 1 else str(past.folder), past, History.of(past), COLORS[index % len(COLORS)])
        for index, (name, past) in enumerate(zip(names, pasts, strict=True))
    ]
    title = f"{len(runs)} raypar runs"
    body = concatenated(
        element("header", element("h1", title), element("p", ", ".join(one.name for one in runs))),
        unread(faults),
        _which(runs, every),
        axis_buttons([one.history.axes() for one in runs]),
        _settings(runs),
        _figures(runs),
        *_charts(runs),
    )
    goes_on = any(past.under_way for past in pasts)
    return document(title, body, every if goes_on else None)


def _which(runs: Sequence[_One], every: int | None) -> Markup:
    rows = [[one.tag(), state(one.past, every), titled(one.past), str(one.past.folder)] for one in runs]
    models = {str(sorted(flat(one.past.config.get("model", {})).items())) for one in runs}
    data = {str(sorted(flat(one.past.config.get("data", {})).items())) for one in runs}
    differ = [name for name, found in (("models", models), ("data", data)) if len(found) > 1]
    text = f"They have different {' and '.join(differ)}: a lower loss need not be a better run." if differ else ""
    shown = html_table(["run", "state", "what", "folder"], rows, ["", "", BELOW, f"{VALUE} {BELOW}"])
    return section("Runs", shown, *([note(text)] if text else []))


def _settings(runs: Sequence[_One]) -> Markup:
    """List the settings, and what else is known of where runs come from, that are not the same in all of them."""
    found = [
        {**flat(one.past.config), **{f"({key})": value for key, value in one.past.provenance.items()}} for one in runs
    ]
    names = {name: None for settings in found for name in settings}
    rows = [
        [name, *(str(settings.get(name, _MISSING)) for settings in found)]
        for name in names
        if len({repr(settings.get(name)) for settings in found}) > 1
    ]
    if not rows:
        return section("Settings that differ", note("None: all settings are the same."))
    heads = ["setting", *(one.tag() for one in runs)]
    return section("Settings that differ", html_table(heads, rows, ["", *[VALUE] * len(runs)]))


def _figures(runs: Sequence[_One]) -> Markup:
    skips = any(one.history.skipped for one in runs)
    found = [dict(headline(one.past, one.history, skips=skips)) for one in runs]
    names = {name: None for figures in found for name in figures}
    rows = [[name, *(figures.get(name, _MISSING) for figures in found)] for name in names]
    return section("Figures", html_table(["", *(one.tag() for one in runs)], rows, ["", *[VALUE] * len(runs)]))


def _charts(runs: Sequence[_One]) -> list[Markup]:
    """Draw every figure that at least one run has, all runs in one chart."""
    unit = " or ".join(sorted({one.history.unit for one in runs})).capitalize()
    curves: list[tuple[str, Callable[[History], Points], Callable[[float], str], bool]] = [  # the last: the axis has 0
        ("Train loss, smoothed", _train_loss, significant, False),
        ("Validation loss", History.validation, significant, False),
        ("Train perplexity, smoothed", _perplexity, significant, False),
        ("Auxiliary losses, smoothed", lambda one: smoothed(aux_total(one)), significant, True),
        ("Load of experts: max/mean", lambda one: smoothed(one.points("max_load")), significant, False),
        ("Choices dropped", _dropped, percentage, True),
        ("Gradient norm, smoothed", lambda one: smoothed(one.points("grad_norm")), significant, True),
        (SCALE, scale_powers, significant, False),
        ("Learning rate", lambda one: one.points("lr"), significant, True),
        (f"{unit}/s", lambda one: one.throughput(), significant, True),
        ("Bubble", lambda one: one.points("bubble"), percentage, True),
        ("Communication within actions", lambda one: one.points("communication"), percentage, True),
        (f"{unit} seen", lambda one: one.seen(), amount, True),
        ("Model FLOP/s of an actor", lambda one: one.model_flops(), amount, True),
    ]
    nats = "nats" if all(one.history.has_perplexity for one in runs) else ""
    sections = list[Markup]()
    for title, of, spelled, zero in curves:
        lines = [
            ChartLine(one.name, points, one.color, run=number, dashes=number % DASHES)
            for number, one in enumerate(runs)
            if (points := of(one.history))
        ]
        if lines:
            unit = nats if of in (_train_loss, History.validation) else ""
            sections.append(section(title, line_chart(lines, spelled, zero=zero, named=True, unit=unit)))
    pairs = [element("div", *sections[at : at + 2], class_="pair") for at in range(1, len(sections), 2)]
    return [*sections[:1], *pairs] or [section("Curves", note("No run has taken a step yet."))]


def _train_loss(history: History) -> Points:
    """Return the loss of every step, smoothed."""
    return smoothed(history.points("loss"))


def _perplexity(history: History) -> Points:
    """Return the perplexity of every step; nothing of a run whose loss is no cross-entropy of tokens."""
    losses = history.points("loss") if history.has_perplexity else []
    return [(step, exp(loss)) for step, loss in smoothed(losses)]


def _dropped(history: History) -> Points:
    """Return the share of dropped choices of every step; nothing of a run that dropped none."""
    points = history.points("dropped")
    return points if any(dropped for _, dropped in points) else []
