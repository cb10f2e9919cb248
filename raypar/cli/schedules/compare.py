"""Chosen schedules side by side: what each takes, holds, keeps and sends, and where their rows differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from shlex import quote
from typing import Annotated

import tyro

from raypar.actors.specs.types import SEND_WINDOW
from raypar.cli.schedules.gallery import MOST_ACTIONS, timeline_pictures
from raypar.cli.words.arguments import parse_command
from raypar.cli.words.output_files import output_file_faults, whole_file
from raypar.cli.words.schedule_flags import SCHEDULE, CostArgs, SizeArgs, cost_faults, load_sized
from raypar.config.schedule import Loaded, takes_costs
from raypar.errors import ConfigError
from raypar.paths import holds_run
from raypar.reporting.html.markup import NUMBER, concatenated, document, element, html_table, note, section
from raypar.schedules.action import SENDS
from raypar.schedules.catalog import entry_of
from raypar.schedules.drawing.cells import lines_in_width
from raypar.schedules.drawing.text import plain
from raypar.schedules.formatting import aligned
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.simulation.simulate import Costs, simulate
from raypar.schedules.timeline import Timeline
from raypar.schedules.versions import Staleness, staleness

_SIZES = "ranks x microbatches of a step"
_FIGURES = (
    "makespan of a step",
    "bubble",
    "activations held, at most",
    "versions of weights kept, at most",
    "steps that a gradient is late, at most",
    "messages a rank sends in a step, at most",
)


@dataclass(frozen=True)
class CompareArgs(CostArgs, SizeArgs):
    """The flags of ``raypar compare``. Durations are those of all layers of a rank."""

    schedules: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar=f"{SCHEDULE} ...")] = ()
    """two schedules or more: names, CSV files, or functions that generate rows. --chunks and --steps are for those of
    them that take several"""
    out: Annotated[Path | None, tyro.conf.arg(aliases=("-o",))] = None
    """write a page with pictures to this file"""

    def costs(self, share: float) -> Costs:
        """Return how long the actions of a stage last that is a share of the layers of a rank."""
        return Costs(f=self.f * share, b=self.b * share, i=self.i * share, w=self.w * share, link=self.link)

    def faults(self) -> list[str]:
        """Return which values are out of range."""
        if runs := [word for word in self.schedules if holds_run(Path(word))]:
            words = " ".join(map(quote, self.schedules))
            return [f"{runs[0]!r} is a run folder, and no schedule: to compare runs, raypar report {words}"]
        few = ["compare takes two schedules or more: give names, such as 1f1b pipedream, or files"]
        wrong = [
            *(few if len(self.schedules) < 2 else []),
            *cost_faults({name: getattr(self, name) for name in ("f", "b", "i", "w", "link")}),
            *output_file_faults("--out", self.out),
        ]
        return wrong and [*wrong, *_unloaded(self)]


@dataclass(frozen=True)
class Side:
    """A schedule that is compared.

    Attributes:
        word: What the user calls it.
        loaded: The schedule, and where it is from.
        timeline: The simulation of it, lowered.
        stale: How old the weights are that it computes gradients with.
    """

    word: str
    loaded: Schedule
    timeline: Timeline
    stale: Staleness

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Ranks, stages, and microbatches of a step: only rows of equal sizes are compared."""
        return self.loaded.num_ranks, self.loaded.num_stages, self.loaded.microbatches_a_step

    @property
    def work(self) -> tuple[int, int]:
        """Pipeline ranks, and microbatches of a step: figures of others are those of other work."""
        return self.loaded.num_pipeline_ranks, self.loaded.microbatches_a_step

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of a table, by ``_FIGURES``."""
        timeline, steps = self.timeline, self.loaded.num_steps
        sends = max(sum(action.op in SENDS for action in row) for row in timeline.schedule.rows)
        return (
            plain(timeline.makespan / steps),
            f"{timeline.bubble:.1%}",
            plain(max(timeline.in_flight) * self.loaded.num_pipeline_ranks / self.loaded.num_stages),
            str(max(self.stale.versions)),
            str(max(most for _, most in self.stale.delays)),
            plain(sends / steps),
        )


def compare(words: Sequence[str]) -> str:
    """Run ``raypar compare``.

    Args:
        words: The words after ``compare``.

    Returns:
        A table of the schedules and where their rows differ, or a line that says which page was written.

    Raises:
        ConfigError: A flag or a schedule is wrong, or the file can't be written.
    """
    what = (
        "Compare schedules: how long they take, what they hold, keep and send, and where their rows differ. Durations "
        "are those of all layers of a rank."
    )
    args = parse_command(CompareArgs(), words, "compare", what)
    sides, faults = list[Side](), list[str]()
    for word in args.schedules:
        try:
            sides.append(_side(word, args))
        except ScheduleError as error:
            faults.append(str(error))
    if faults or (faults := list(_unused(args, sides))):
        raise ConfigError(list(dict.fromkeys(faults)))
    if args.out is None:
        paragraphs = [f"{title}\n" + "\n".join(f"    {line}" for line in body) for title, body in _paragraphs(sides)]
        return "\n\n".join([*_unlike(sides), _table(sides), *paragraphs])
    with whole_file("--out", args.out) as write:
        write(_page(args, sides))
    return f"{len(sides)} schedules are compared in {args.out}"


def _side(word: str, args: CompareArgs) -> Side:
    """Load, prove and simulate a schedule. Raises ScheduleError."""
    stages = args.chunks if _takes_chunks(word, args.chunks) else None
    costs = args.costs(1 / (stages or entry_of(word).default_chunks)) if takes_costs(word) else None
    loaded = _load(word, args, costs)
    schedule = loaded.lowered()
    if args.out is not None and schedule.num_actions > MOST_ACTIONS:
        fix = "give smaller sizes, or leave --out out"
        raise ScheduleError(f"{word} has {schedule.num_actions} actions, {MOST_ACTIONS} can be drawn: {fix}")
    costs = args.costs(schedule.num_pipeline_ranks / schedule.num_stages)
    timeline = simulate(schedule, costs, send_capacity=SEND_WINDOW)
    return Side(word, loaded.schedule, timeline, staleness(schedule))


def _load(word: str, args: CompareArgs, costs: Costs | None) -> Loaded:
    """Load a schedule; one with a fixed number of stages a rank has that. Raises ScheduleError."""
    return load_sized(word, args if _takes_chunks(word, args.chunks) else replace(args, chunks=None), costs)


def _takes_chunks(word: str, chunks: int | None) -> bool:
    """Return whether a number of stages on each rank is the schedule's matter: it can have it, or none can."""
    if chunks is None or Path(word).suffix == ".csv":
        return False
    sizes = entry_of(word).sizes
    return chunks < 1 or sizes.min_chunks != sizes.max_chunks or chunks == sizes.max_chunks


def _unloaded(args: CompareArgs) -> Iterator[str]:
    """Yield why schedules can't be loaded, whatever the durations."""
    for word in dict.fromkeys(args.schedules):
        try:
            _load(word, args, None)
        except ScheduleError as error:
            yield str(error)


def _unused(args: CompareArgs, sides: Sequence[Side]) -> Iterator[str]:
    """Yield which flags none of the schedules takes."""
    if args.steps is not None and not any(side.loaded.stream for side in sides):
        yield f"--steps {args.steps}: none of the schedules is asynchronous: leave --steps out"
    if args.chunks is not None and not any(_takes_chunks(side.word, args.chunks) for side in sides):
        yield f"--chunks {args.chunks}: none of the schedules can have as many stages a rank: leave --chunks out"


def _unlike(sides: Sequence[Side]) -> list[str]:
    """Return what to read before figures of schedules of several sizes, and how to get one; [] if they have one."""
    if len({side.work for side in sides}) == 1:
        return []
    files = {side.work for side in sides if Path(side.word).suffix == ".csv"}
    (ranks, microbatches), *others = files or {(0, 0)}
    fix = f": give --ranks {ranks} --microbatches {microbatches}" if ranks and not others else ""
    return [f"these schedules have other ranks or microbatches, so their figures are not of the same work{fix}"]


def _rows(sides: Sequence[Side]) -> list[tuple[str, ...]]:
    """Return the rows of a table, each with its name: the sizes where they differ, then the figures."""
    sizes = [(_SIZES, *(" x ".join(map(str, side.work)) for side in sides))] if _unlike(sides) else []
    return [*sizes, *zip(_FIGURES, *(side.cells for side in sides), strict=True)]


def _table(sides: Sequence[Side]) -> str:
    rows = [("", *(side.word for side in sides)), *_rows(sides)]
    return "\n".join(lines_in_width([row[0] for row in rows], aligned(row[1:] for row in rows)))


def _paragraphs(sides: Sequence[Side]) -> Iterator[tuple[str, list[str]]]:
    """Yield the paragraphs below the table, each as a title and lines: versions of weights, and rows that differ."""
    for side in sides:
        if side.loaded.stream:
            yield f"{side.word}, {side.loaded.stream} steps", side.stale.lines()
    for index, side in enumerate(sides[1:], start=1):
        other = next((one for one in sides[:index] if one.sizes == side.sizes), None)
        if other is None and side.work in {one.work for one in sides[:index]}:
            yield side.word, ["no schedule before it has its stages: its rows are not compared"]
        elif other is not None:
            yield f"{other.word} and {side.word}, where each rank first differs", _differences(other, side)


def _differences(one: Side, other: Side) -> list[str]:
    """Return a line for each rank: the first place where two schedules of equal sizes differ, or that none does."""
    computes = not one.loaded.lowered and not other.loaded.lowered
    both = (one.loaded, other.loaded) if computes else (one.timeline.schedule, other.timeline.schedule)
    texts = []
    for rank, rows in enumerate(zip(*both, strict=True)):
        pairs = enumerate(zip_longest(*rows))
        found = next(((index, here, there) for index, (here, there) in pairs if here != there), None)
        if found is None:
            texts.append(f"rank {rank}: the same")
        else:
            index, here, there = found
            texts.append(f"rank {rank}, action {index}: {here or 'the end'} and {there or 'the end'}")
    return texts


def _page(args: CompareArgs, sides: Sequence[Side]) -> str:
    title = f"Schedules {', '.join(side.word for side in sides)}"
    costs = f"F {args.f:g}, B {args.b:g}, I {args.i:g}, W {args.w:g} for all layers of a rank, link {args.link:g}"
    unlike = [note(f"{text[0].upper()}{text[1:]}.") for text in _unlike(sides)]
    heads, kinds = ("", *(side.word for side in sides)), ("", *(NUMBER for _ in sides))
    head = section("Side by side", *unlike, html_table(heads, _rows(sides), kinds), note(f"{costs}."))
    paragraphs = [
        section(name, element("ul", *(element("li", line) for line in body))) for name, body in _paragraphs(sides)
    ]
    pictures = timeline_pictures([side.timeline for side in sides])
    drawn = [section(side.word, picture) for side, picture in zip(sides, pictures, strict=True)]
    return document(title, concatenated(element("h1", title), head, *paragraphs, *drawn))
