"""All schedules side by side, with what each takes and holds: a table, or a page with their pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from markupsafe import Markup

from raypar.cli.words.arguments import parse_command
from raypar.cli.words.output_files import output_file_faults, whole_file
from raypar.cli.words.schedule_flags import cost_faults
from raypar.reporting.html.markup import BELOW, NUMBER, concatenated, document, element, html_table, note, section
from raypar.schedules.catalog import CATALOG, build
from raypar.schedules.drawing.cells import lines, lines_with_texts
from raypar.schedules.drawing.svg import svg
from raypar.schedules.drawing.text import plain
from raypar.schedules.formatting import aligned
from raypar.schedules.passes.lower import lower
from raypar.schedules.passes.split_backward import split_backward
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.simulation.simulate import Costs, simulate
from raypar.schedules.timeline import Timeline

MOST_ACTIONS = 20_000  # of all ranks: what a page shows of one schedule
_STEPS = 4  # of an asynchronous schedule
_HEAD = ("makespan", "bubble", "held", "what it is")


@dataclass(frozen=True)
class GalleryArgs:
    """The flags of ``raypar gallery``."""

    ranks: int = 4
    """pipeline ranks"""
    microbatches: int = 8
    """microbatches of a step"""
    f: float = 1.0
    """duration of a forward of all layers of a rank, in any unit"""
    i: float = 1.0
    """duration of the input half of their backward"""
    w: float = 1.0
    """duration of the weight half of their backward; a whole backward takes both"""
    link: float = 0.0
    """time from the end of a compute action to the arrival of its value on another rank"""
    out: Annotated[Path | None, tyro.conf.arg(aliases=("-o",))] = None
    """write a page with pictures to this file"""

    def faults(self) -> list[str]:
        """Return which values are out of range."""
        costs = {"f": self.f, "i": self.i, "w": self.w, "link": self.link}
        wrong = cost_faults(costs)
        sizes = {"ranks": self.ranks, "microbatches": self.microbatches}
        wrong += [f"--{name} is {size}: it must be 1 or more" for name, size in sizes.items() if size < 1]
        if not wrong and 6 * self.ranks * self.microbatches > MOST_ACTIONS:
            most = {
                other: MOST_ACTIONS // (6 * size) for other, size in zip(reversed(sizes), sizes.values(), strict=True)
            }
            fixes = [f"{number} {name} at most" for name, number in most.items() if number] or ["fewer of both"]
            many = f"{self.ranks} ranks x {self.microbatches} microbatches are too many to draw"
            wrong.append(f"{many}: use {' or '.join(fixes)}")
        return [*wrong, *output_file_faults("--out", self.out)]


@dataclass(frozen=True)
class Shown:
    """A schedule of the gallery.

    Attributes:
        name: Its name; "auto" is added where backwards are split by the pass that a run uses by itself.
        what: What it is, or why it can't be made with these sizes.
        timeline: Its simulation; None if it can't be made.
        held: The most microbatches that a rank holds, as shares of all its layers.
    """

    name: str
    what: str
    timeline: Timeline | None = None
    held: float = 0.0

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of a table, by ``_HEAD``."""
        if self.timeline is None:
            return "-", "-", "-", self.what
        each = self.timeline.makespan / self.timeline.schedule.num_steps
        return plain(each), f"{self.timeline.bubble:.1%}", plain(self.held), self.what


def gallery(words: Sequence[str]) -> str:
    """Run ``raypar gallery``.

    Args:
        words: The words after ``gallery``.

    Returns:
        A table of all schedules, or a line that says which page was written.

    Raises:
        ConfigError: A flag is wrong, or the file can't be written.
    """
    args = parse_command(
        GalleryArgs(), words, "gallery", "Show all schedules side by side: how long they take, what they hold."
    )
    found = [one for name in CATALOG if not CATALOG[name].forward_only for one in _shown(name, args)]
    if args.out is None:
        *columns, texts = zip(_HEAD, *(one.cells for one in found), strict=True)
        figures = lines(["", *(one.name for one in found)], aligned(zip(*columns, strict=True)))
        return "\n".join(lines_with_texts(figures, texts))
    with whole_file("--out", args.out) as write:
        write(_page(args, found))
    return f"{len(found)} schedules are drawn in {args.out}"


def _shown(name: str, args: GalleryArgs) -> list[Shown]:
    """Return a schedule of the catalog, and the same with backwards split where that makes it shorter."""
    what = CATALOG[name].summary
    chunks = CATALOG[name].default_chunks
    f, i, w = (cost / chunks for cost in (args.f, args.i, args.w))
    costs = Costs(f=f, b=i + w, i=i, w=w, link=args.link)
    try:
        schedule = build(name, args.ranks, args.microbatches, steps=_STEPS, costs=costs)
    except ScheduleError as error:
        return [Shown(name, str(error).partition(": ")[2])]
    both = [_simulated(name, what, schedule, costs, chunks)]
    if schedule.stream:
        return both
    split = split_backward(lower(schedule), costs)
    if split.rows != lower(schedule).rows:
        both.append(_simulated(f"{name}, auto", "the same with backwards split where that helps", split, costs, chunks))
    return both


def _simulated(name: str, what: str, schedule: Schedule, costs: Costs, chunks: int) -> Shown:
    timeline = simulate(schedule, costs)
    return Shown(name, what, timeline, max(timeline.in_flight) / chunks)


def _page(args: GalleryArgs, found: Sequence[Shown]) -> str:
    title = f"Schedules of {args.ranks} ranks and {args.microbatches} microbatches"
    legend = (
        f"F {args.f:g}, I {args.i:g}, W {args.w:g} for all layers of a rank, link {args.link:g}; a backward takes "
        f"I and W. Of an asynchronous schedule the makespan is that of one of {_STEPS} steps. The bubble is the share "
        "of all ranks' time in which nothing is computed. Held is the most "
        "microbatches whose activations a rank holds."
    )
    rows = [(one.name, *one.cells) for one in found]
    head = section(
        "Side by side", html_table(("schedule", *_HEAD), rows, ("", NUMBER, NUMBER, NUMBER, BELOW)), note(legend)
    )
    timelines = [(one, one.timeline) for one in found if one.timeline is not None]
    pictures = timeline_pictures([timeline for _, timeline in timelines])
    drawn = [section(one.name, note(one.what), picture) for (one, _), picture in zip(timelines, pictures, strict=True)]
    return document(title, concatenated(element("h1", title), head, *drawn))


def timeline_pictures(timelines: Sequence[Timeline]) -> list[Markup]:
    """Draw timelines for a page, all on one time axis; on a narrow page they scroll."""
    span = max((timeline.makespan for timeline in timelines), default=0.0)
    return [element("div", Markup(svg(timeline, span=span)), class_="wide") for timeline in timelines]
