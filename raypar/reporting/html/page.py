"""The HTML page of a run's report, with one function for each section."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from markupsafe import Markup

from raypar.reporting.html.about import circumstances, configuration, provenance_list, samples
from raypar.reporting.html.actors import memory, steps, times
from raypar.reporting.html.charts import ChartLine, Mark, axis_buttons, line_chart, stacked
from raypar.reporting.html.events import ending, happenings
from raypar.reporting.html.experts import experts
from raypar.reporting.html.figures import History, Points, exp, headline, middle, rate, significant, smoothed
from raypar.reporting.html.forecast import forecast
from raypar.reporting.html.half_precision import loss_scale, overflow
from raypar.reporting.html.markup import (
    BELOW,
    NUMBER,
    concatenated,
    contents,
    document,
    element,
    folded,
    html_table,
    note,
    section,
)
from raypar.reporting.report import utilisation_text
from raypar.reporting.run_folder.read import Past
from raypar.schedules.formatting import amount, duration, percentage, size

_DAY = 86_400  # seconds
_NONE = "No step was taken yet."
_BUBBLE = (
    "The share of the actors' time, from the first action of a step to the last, in which they compute nothing. "
    "Medians leave out the first step, which also warms up."
)


def losses(history: History, marks: Sequence[Mark]) -> Markup:
    """Draw train and validation loss over steps, each step's and smoothed."""
    points = history.points("loss")
    lines = [ChartLine("train, smoothed", smoothed(points)), ChartLine("train, every step", points, faint=True)]
    if history.evaluations:
        lines.append(ChartLine("validation", history.validation(), "two"))
    drawn = line_chart(lines, significant, marks=marks, unit="nats" if history.has_perplexity else "")
    text = note("Smoothed: moving averages from both sides, each over a twentieth of the steps, at least 5.")
    return section("Loss", drawn, text) if history.steps else section("Loss", note(_NONE))


def optimizer(history: History, marks: Sequence[Mark]) -> Markup:
    """Draw learning rate and gradient norm over steps."""
    norms = history.points("grad_norm")
    lines = [ChartLine("smoothed", smoothed(norms)), ChartLine("every step", norms, faint=True)]
    return _pair(
        section("Learning rate", _curve(history, "learning rate", history.points("lr"), significant, marks)),
        section("Gradient norm before clipping", line_chart(lines, significant, zero=True, marks=marks)),
    )


def progress(history: History, marks: Sequence[Mark]) -> Markup:
    """Draw what was seen and, where the loss is a cross-entropy of tokens, the perplexity over steps."""
    seen = section(f"{history.unit.capitalize()} seen", _curve(history, "seen", history.seen(), amount, marks))
    if not history.has_perplexity:
        text = "Left out: the loss is not known to be a cross-entropy of tokens, so that exp(loss) says nothing."
        return _pair(seen, section("Perplexity", note(text)))
    lines = [ChartLine("train, smoothed", [(step, exp(loss)) for step, loss in smoothed(history.points("loss"))])]
    if history.evaluations:
        lines.append(ChartLine("validation", [(step, exp(loss)) for step, loss in history.validation()], "two"))
    return _pair(section("Perplexity", line_chart(lines, significant, marks=marks)), seen)


def speed(history: History, marks: Sequence[Mark]) -> Markup:
    """Draw the throughput and the bubble over steps, without those taken by hand, whose times say nothing."""
    name, by_hand = f"{history.unit}/s", history.by_hand
    text = [note(f"Left out: {by_hand:,} stepped by hand, whose times say nothing of a run.")] if by_hand else []
    points = history.throughput()
    daily = [note(f"{amount(_DAY * median(value for _, value in points))} {history.unit} a day.")] if points else []
    lines = [ChartLine("bubble", history.points("bubble"))]
    within = history.points("communication")
    if any(share for _, share in within):
        lines.append(ChartLine("communication within actions", within, "two", dashes=1))
    drawn = line_chart(lines, percentage, zero=True, marks=marks) if history.steps else note(_NONE)
    return _pair(
        section(name.capitalize(), _curve(history, name, points, significant, marks), *daily, *text),
        section("Bubble", drawn, note(_BUBBLE), *text),
    )


def utilisation(history: History, marks: Sequence[Mark], peak: float | None) -> Markup:
    """Draw model FLOPs utilisation over steps; without a device's peak, the FLOP/s of an actor."""
    flops = history.model_flops()
    if not flops:
        title, why = "Model FLOPs", "Left out: the FLOPs of the user's own layers are not known."
        return section(title, note(why))
    text = (
        f"Median of an actor: {rate(middle(flops))}. Only what the model needs counts: a forward, and twice as much in "
        "the backward; nothing that is recomputed."
    )
    own, again = history.points("mfu"), history.points("hfu")
    if peak is None and own:
        lines = [ChartLine("model FLOPs", own)]
        if again != own:
            lines.append(ChartLine("with what is recomputed", again, "two", dashes=1))
        said = utilisation_text(middle(own), middle(again))
        drawn = line_chart(lines, percentage, zero=True, marks=marks)
        why = f"Medians of the peak of the run's GPUs, by their data sheets: {said}."
        return section("FLOPs utilisation", drawn, note(f"{text} {why}"))
    if peak is None:
        why = "Utilisation is left out: the peak of the device is not known. raypar report --peak gives it, in FLOP/s."
        drawn = _curve(history, "FLOP/s", flops, amount, marks)
        return section("Model FLOP/s of an actor", drawn, note(f"{text} {why}"))
    used: Points = [(step, value / peak) for step, value in flops]
    drawn = _curve(history, "utilisation", used, percentage, marks)
    return section("Model FLOPs utilisation", drawn, note(f"{text} The device's peak is {rate(peak)}."))


def messages(past: Past, marks: Sequence[Mark]) -> Markup:
    """Show the ledger of the last launch: seconds by axis and op, and the calls and bytes of every actor."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for counted in past.ledger.values():
        for kind, counts in counted.items():
            for index, value in enumerate(counts):
                sums[kind][index] += value or 0
    if not sums:
        return section("Messages", note("Nothing was moved between actors, or it was not written."))
    timed = any(counts.seconds is not None for counted in past.ledger.values() for counts in counted.values())
    ordered = sorted(sums.items(), key=lambda row: -row[1][2 if timed else 1])
    rows = [
        [kind, f"{calls:,.0f}", size(moved, tenths=True), duration(seconds) if timed else "not known"]
        for kind, (calls, moved, seconds) in ordered
    ]
    text = (
        "Sums over all actors. Seconds are those in which an actor started an op or waited for it, late peers included."
        if timed
        else "Sums over all actors. This folder is of a raypar that did not write the seconds."
    )
    if resumed := [mark.step for mark in marks if mark.kind == "resume"]:
        text += f" They are of the last session, after step {resumed[-1]:,}, with its evaluations."
    seconds = {kind: {"seconds": spent} for kind, (_, _, spent) in ordered}
    shown = stacked(seconds, {"seconds": "one"}, duration) if timed else Markup()
    whole = html_table(["axis and op", "calls", "bytes", "seconds"], rows, ["", NUMBER, NUMBER, NUMBER])
    each = [
        [
            actor,
            kind,
            f"{counts.calls:,}",
            size(counts.bytes, tenths=True),
            "" if counts.seconds is None else duration(counts.seconds),
        ]
        for actor, counted in past.ledger.items()
        for kind, counts in counted.items()
    ]
    by_actor = html_table(["actor", "axis and op", "calls", "bytes", "seconds"], each, ["", "", NUMBER, NUMBER, NUMBER])
    return section("Messages", shown, whole, note(text), folded("By actor", by_actor))


def checkpoint_list(past: Past) -> Markup:
    """List the checkpoints of the folder."""
    rows = [
        [
            one.path.name,
            f"{one.step:,}",
            f"{one.tensors:,}",
            size(one.size, tenths=True),
            "; ".join(one.faults) or "sound",
        ]
        for one in past.checkpoints
    ]
    heads = ["checkpoint", "after step", "tensors", "bytes", "manifest"]
    listed = html_table(heads, rows, ["name", NUMBER, NUMBER, NUMBER, BELOW])
    return section("Checkpoints", listed if rows else note("None."))


def events(marks: Sequence[Mark]) -> Markup:
    """List the meaning of the marks; nothing if there are none."""
    if not marks:
        return Markup()
    rows = [[mark.sign, f"{mark.step:,.0f}", mark.text] for mark in marks]
    return section("What happened", html_table(["mark", "steps taken", "what"], rows, ["", NUMBER, ""]))


def failures(past: Past, history: History) -> Markup:
    """List the failures of the run, what they cost, and the share of its time that it trained; nothing without any."""
    if not past.failures:
        return Markup()
    rows = [
        [
            f"{one['step']:,}",
            one["reason"],
            folded(_died(one["death"]), element("pre", "\n".join(one["death"]["log"])))
            if one["death"] and one["death"]["log"]
            else _died(one["death"]),
            "ended the run" if one["is_end"] else f"went on after step {one['back_to']:,}",
            ", ".join(one["replaced"]),
            "" if one["is_end"] else duration(one["lost"]),
        ]
        for one in past.failures
    ]
    heads = ["in step", "what", "how it died", "the run", "replaced", "lost"]
    listed = html_table(heads, rows, [NUMBER, "", "", "", "", NUMBER])
    if (effective := history.effective(past.failures)) is None:
        return section("Failures", listed)
    text = note(
        f"Effective training time (ETTR): {percentage(effective)}, "
        "the time of the steps that were kept, over that and what "
        "the failures that the run survived have cost: the step under way, the steps taken again, and the recovery."
    )
    return section("Failures", listed, text)


def _died(death: dict[str, Any] | None) -> str:
    """Say in a few words how a process died."""
    if death is None:
        return ""
    text = death["cause"] or "not known here"
    return f"{text}, in {death['last_action']}" if death["last_action"] else text


def page(past: Past, *, faults: Sequence[str] = (), peak: float | None = None, every: int | None = None) -> str:
    """Make the HTML page of a run folder.

    Args:
        past: The content of the run folder.
        faults: What could not be read of it.
        peak: Peak FLOP/s of the device of one actor; None if not known.
        every: Seconds after which a page that is served loads itself again while the run goes on; None for a file.

    Returns:
        The HTML.
    """
    history, marks = History.of(past), happenings(past)
    title = titled(past)
    tiles = [
        element("div", element("b", value), element("span", name), class_="tile")
        for name, value in headline(past, history)
    ]
    top = concatenated(
        element(
            "header",
            element("h1", title),
            element("p", f"raypar run in {past.folder.name}. {state(past, every)}", title=str(past.folder)),
            *([element("p", made)] if (made := circumstances(past)) else []),
        ),
        unread(faults),
        element("div", *tiles, class_="tiles"),
    )
    body = concatenated(
        events(marks),
        losses(history, marks),
        samples(past),
        *([optimizer(history, marks), progress(history, marks), speed(history, marks)] if history.steps else []),
        *([utilisation(history, marks, peak)] if history.steps else []),
        *experts(history, marks),
        loss_scale(history, marks),
        overflow(history),
        forecast(past, history),
        times(past),
        steps(past),
        memory(history),
        messages(past, marks),
        checkpoint_list(past),
        failures(past, history),
        provenance_list(past),
        configuration(past),
    )
    whole = concatenated(top, contents(body), axis_buttons([history.axes()]), body)
    return document(f"{past.folder.name}: {title}", whole, every if past.under_way else None)


def state(past: Past, every: int | None) -> str:
    """Say whether the run goes on and, on a page that is served, whether the page follows it."""
    if past.under_way:
        text = "The run goes on" if past.metrics else "The run has not taken a step yet"
        return f"{text}." if every is None else f"{text}; this page loads itself every {every} seconds."
    text = f"The run {ending(past) or 'has ended'}".removesuffix(".")
    return f"{text}." if every is None else f"{text}; this page does not refresh any more."


def unread(faults: Sequence[str]) -> Markup:
    """List what could not be read; nothing if there is nothing."""
    listed = element("ul", *(element("li", fault) for fault in faults))
    return section("Could not be read", listed, note("All the rest is shown.")) if faults else Markup()


def titled(past: Past) -> str:
    """Describe a run in one line: model, mesh and schedule."""
    return ", ".join([_model(past.config), *([past.schedule.name] if past.schedule else [])])


def _pair(one: Markup, other: Markup) -> Markup:
    return element("div", one, other, class_="pair")


def _curve(history: History, name: str, points: Points, spelled: Any, marks: Sequence[Mark]) -> Markup:
    return line_chart([ChartLine(name, points)], spelled, zero=True, marks=marks) if history.steps else note(_NONE)


def _model(config: dict[str, Any]) -> str:
    """Describe the model and its mesh in a few words."""
    if not config:
        return "a run whose run.toml can't be read"
    model, mesh = config["model"], config["mesh"]
    names = [f"{model[name]} {name}" for name in ("layers", "hidden") if isinstance(model.get(name), int)]
    axes = [f"{axis}={size}" for axis, size in mesh.items() if size not in (0, 1, "none", None, [])]
    kind = "Llama" if model.get("kind") == "llama" else "GPT"
    moe = model.get("moe")
    if isinstance(moe, dict) and isinstance(moe.get("experts"), int):
        names.append(f"{moe['experts']} experts")
    what = f"{kind} of {names[0]}, {', '.join(names[1:])}" if names else "a model of the user's own layers"
    return f"{what} on {' '.join(axes) or 'one actor'}"
