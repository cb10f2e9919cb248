"""The commands for schedules, which need no actors, torch or Ray: draw, check and simulate."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from raypar.actors.specs.types import SEND_WINDOW
from raypar.cli.schedules.gather_placements import RESHARDS, Reshard, placement_table, placements
from raypar.cli.words.arguments import Arguments, parse_command
from raypar.cli.words.schedule_flags import SCHEDULE, CostArgs, SizeArgs, cost_faults, load_sized
from raypar.config.schedule import MOST_CELLS, Loaded, Pass
from raypar.errors import ConfigError
from raypar.planner.fleet.fleet import FleetOutcome, simulate_fleet
from raypar.reporting.screen import printable
from raypar.schedules.catalog import CATALOG
from raypar.schedules.checking.counterexample import demand_sound
from raypar.schedules.checking.errors import CheckError
from raypar.schedules.drawing.cells import lines, padded, widest
from raypar.schedules.drawing.files import drawings, save
from raypar.schedules.drawing.text import WIDTH, outcome_summary, text
from raypar.schedules.formatting import milliseconds
from raypar.schedules.passes.gather_weights import GatherWhen, gather_weights
from raypar.schedules.passes.lower import Order, lower
from raypar.schedules.passes.reduce_gradients import ReduceWhen, reduce_gradients
from raypar.schedules.rules import most_in_flight
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.simulation.simulate import Costs, outcome
from raypar.schedules.versions import staleness

A = TypeVar("A", bound="PaperArgs")
Format = Literal["text", "svg", "csv", "json"]
_WHOLE = "-o FILE.svg"  # what draws all of a schedule that does not fit
_SUFFIXES: dict[Format, str] = {"text": ".txt", "svg": ".svg", "csv": ".csv", "json": ".json"}
_MOST_PROVED = 10_000_000  # microbatches x stages that are proved without a run; 1,024 ranks x 4,096 take about 8 GB


def fleet_text(found: FleetOutcome) -> str:
    """Return the outcome in lines."""
    days, wall = found.days, found.days.wall
    slow = found.median / found.ideal - 1 if found.ideal else 0.0
    lines = [
        f"cluster: {found.actors:,} actors; a step takes {milliseconds(found.median)} (median), {slow:.1%} more than "
        f"where nothing is slow, and {milliseconds(found.slowest)} at the most",
        f"{found.steps:,} steps take {timedelta(seconds=round(wall))}, goodput {found.goodput:.1%}",
    ]
    if math.isinf(found.mtbf):
        return "\n".join([*lines, f"no node fails; saves take {days.saving / wall if wall else 0:.1%}"])
    parts = {"lost": days.lost, "saves": days.saving, "restarts": days.restarting}
    shares = ", ".join(f"{name} {seconds / wall:.1%}" for name, seconds in parts.items())
    return "\n".join(
        [
            *lines,
            f"{days.failures:,} failures, one in {found.mtbf / 3600:.2f} hours: {shares}",
            f"trained {found.trained:.1%} of the time, {found.closed_form:.1%} by Daly's formula",
            f"a save every {found.every:,} steps, {found.interval:,.0f} s; Young {found.young:,.0f} s, "
            f"Daly {found.daly:,.0f} s",
        ]
    )


def fleet_figures(found: FleetOutcome) -> dict[str, Any]:
    """Return the outcome as figures; what is infinite is None."""
    figures = {**asdict(found), "trained": found.trained, "goodput": found.goodput}
    return {name: None if isinstance(one, float) and math.isinf(one) else one for name, one in figures.items()}


@dataclass(frozen=True)
class PaperArgs(SizeArgs, Arguments):
    """The flags that draw, check and simulate share."""

    schedule: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar=SCHEDULE)]
    """a name, a CSV file as torch.distributed.pipelining and raypar draw write it, or a function that generates rows"""
    gather: GatherWhen | None = None
    """make weights whole that are sharded over replicas: from a stage's first forward to its last backward in the step,
    or around each forward and each backward of a microbatch; None: they are whole all the time"""
    resident: int | None = None
    """with --gather step: the most stages of a rank that are whole at once"""
    reshard_after_forward: Reshard = "always"
    """with --gather microbatch: whether weights are freed between the forward and the backward of a microbatch"""
    reduce: ReduceWhen | None = None
    """reduce gradients over replicas, once a step or once a microbatch; None: there are no replicas"""


@dataclass(frozen=True)
class DrawArgs(PaperArgs):
    """The flags of ``raypar draw``."""

    format: Format | None = None
    """a grid, a picture, torch's table or a trace for ui.perfetto.dev; None: by the suffix of --out, else text"""
    lowered: bool = False
    """draw the communication too: SEND, RECV and the STEP at the end"""
    out: Annotated[Path | None, tyro.conf.arg(aliases=("-o",))] = None
    """write to this file instead of the screen"""


@dataclass(frozen=True)
class CheckArgs(PaperArgs):
    """The flags of ``raypar check``."""

    blocking: bool = False
    """prove it for sends that block until they are received; raypar's own sends do not block"""
    max_versions: int | None = None
    """the most versions of its weights that a stage may keep in an asynchronous schedule; None: as many as it needs"""
    order: Order = "just_in_time"
    """where to insert the communication if the file has none; one_sweep is safe with sends that block"""


@dataclass(frozen=True)
class SimulateArgs(CostArgs, PaperArgs):
    """The flags of ``raypar simulate``."""

    unshard: float = 0.0
    """duration of a gather of a stage's weights, beside the actions; with --gather, a table compares all placements"""
    reduce_grad: float = 0.0
    """duration of a reduction of a stage's gradients"""
    units: int = 1
    """in how many units, such as layers, a stage is gathered; they arrive one by one where one action needs them"""
    weights_mib: float = 0.0
    """MiB of a stage's whole weights, for the table's peaks"""
    activations_mib: float = 0.0
    """MiB that a forward of a microbatch keeps in a stage, likewise"""
    cluster: Path | None = None
    """a TOML file of a cluster with stragglers, slow links, failures and checkpoints: how much of the time of a
    training there is of use; durations are in seconds then"""
    format: Literal["text", "json"] = "text"
    """json: one JSON object, for programs"""

    def durations(self) -> dict[str, Any]:
        """Return how long actions take, by the names of Costs."""
        return {name: getattr(self, name) for name in ("f", "b", "i", "w", "link", "unshard", "reduce_grad")}

    def faults(self) -> list[str]:
        """Return which values are out of range."""
        wrong = cost_faults(
            self.durations() | {"weights_mib": self.weights_mib, "activations_mib": self.activations_mib}
        )
        return wrong + ([f"--units is {self.units}: it must be 1 or more"] if self.units < 1 else [])


def draw(words: Sequence[str], terminal: bool) -> str:
    """Run ``raypar draw``.

    Args:
        words: The words after ``draw``.
        terminal: Whether to use colours and cut lines to the terminal's width.

    Returns:
        The drawing, or a line that says which file was written.

    Raises:
        ScheduleError: The schedule is wrong or the file can't be written.
    """
    args = _parse(DrawArgs, words, "draw", "Draw a schedule.")
    loaded = _load(args)
    _warn_of_faults(args.schedule, loaded)
    schedule = replace(loaded.schedule, name=printable(loaded.schedule.name))  # what draw returns may have colours
    if args.lowered:
        schedule = lower(schedule)
    for change in _passes(args):
        schedule = change(schedule)
    color = terminal and args.out is None
    kinds = drawings(schedule)
    kinds[".txt"] = lambda: (_rows if args.lowered else _grid)(schedule, color)
    suffix = _SUFFIXES[args.format] if args.format else (args.out.suffix if args.out else "") or ".txt"
    if args.out is None:
        return kinds[suffix]().rstrip("\n")
    try:
        save(args.out, kinds, suffix)
    except OSError as error:
        reason = f"--out {str(args.out)!r} can't be written ({error.strerror}): give another path"
        raise ScheduleError(reason) from error
    return f"{schedule.name} is drawn in {printable(str(args.out))}"


def prove(words: Sequence[str]) -> str:
    """Run ``raypar check``.

    Args:
        words: The words after ``check``.

    Returns:
        A text that says what was proved.

    Raises:
        ScheduleError: The schedule breaks a rule.
    """
    what = "Prove that a schedule can run: nothing missing, nothing twice, everything in order, no deadlock."
    args = _parse(CheckArgs, words, "check", what)
    loaded = _load(args, most_cells=_MOST_PROVED)
    if args.max_versions is not None:
        demand_sound(loaded.schedule, loaded.generate, max_versions=args.max_versions)
    try:
        capacity = 0 if args.blocking else SEND_WINDOW
        schedule = loaded.lowered(args.order, passes=_passes(args), send_capacity=capacity)
    except CheckError as error:
        sweepable = args.blocking and args.order != "one_sweep" and not loaded.schedule.lowered
        if sweepable and all(fault.rule == "deadlock" for fault in error.faults):
            raise ScheduleError(f"{error}\nwith sends that block, take --order one_sweep") from error
        raise
    sends = "sends that block until they are received" if args.blocking else f"{SEND_WINDOW} sends under way to a peer"
    held = " ".join(map(str, most_in_flight(schedule)))
    stale = [f"    {line}" for line in staleness(schedule).lines()] if schedule.stream else []
    proved = (
        f"ok: {_sizes(schedule)}, {schedule.num_actions} actions\n"
        f"    complete, in order, each SEND with its RECV and received in the order in which it is sent,\n"
        f"    no deadlock with {sends}; activations in flight {held}"
    )
    return "\n".join([proved, *stale])


def measure(words: Sequence[str]) -> str:
    """Run ``raypar simulate``.

    Args:
        words: The words after ``simulate``.

    Returns:
        Makespan, bubble and activations in flight of the lowered schedule, as text or as JSON.

    Raises:
        ScheduleError: The schedule or a duration is wrong.
    """
    args = _parse(
        SimulateArgs, words, "simulate", "Simulate a schedule: how long it takes, and how much of it is bubble."
    )
    given, sizes = args.durations(), (args.weights_mib, args.activations_mib)
    costs = Costs(**given, units=args.units)
    loaded = _load(args, costs)
    schedule = loaded.lowered(passes=_passes(args))
    found = outcome(schedule, costs, send_capacity=SEND_WINDOW)
    fleet = None if args.cluster is None else _fleet(args.cluster, schedule, costs)
    compared = placements(loaded.lowered(passes=_reductions(args)), costs, *sizes) if args.gather else []
    if args.format == "text":
        durations = f"F {args.f:g}, B {args.b:g}, I {args.i:g}, W {args.w:g}, link {args.link:g}"
        durations += f", UNSHARD {args.unshard:g}" if args.gather else ""
        durations += f", REDUCE_GRAD {args.reduce_grad:g}" if args.reduce else ""
        text = f"{_sizes(schedule)}\ncosts{_of_each_stage(schedule)}: {durations}\n{outcome_summary(found)}"
        text = f"{text}\n\n{placement_table(compared)}" if compared else text
        return text if fleet is None else f"{text}\n\n{fleet_text(fleet)}"
    figures: dict[str, Any] = {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.microbatches_a_step,
        "steps": schedule.num_steps,
        "costs": given,
        "makespan": found.makespan,
        "bubble": found.bubble,
        "busy": list(found.busy),
        "in_flight": list(found.in_flight),
        "placements": [asdict(one) for one in compared],
        "cluster": None if fleet is None else fleet_figures(fleet),
    }
    return json.dumps(figures)


def _fleet(path: Path, schedule: Schedule, costs: Costs) -> FleetOutcome:
    """Simulate a training on the cluster of a file. Raises ScheduleError."""
    if schedule.stream:
        raise ScheduleError(f"--cluster: {schedule.name} is asynchronous: take a synchronous schedule")
    if any(costs.is_beside(action) for row in schedule.rows for action in row):
        raise ScheduleError("--cluster simulates no gathers: leave out --gather, and give reduce_seconds in the file")
    try:
        from raypar.planner.fleet.fleet_file import read_fleet  # imports pydantic, which other commands do without

        return simulate_fleet(schedule, costs, read_fleet(path, schedule.num_ranks))
    except ConfigError as error:
        raise ScheduleError("\n".join(error.faults)) from error


def _parse(kind: type[A], words: Sequence[str], command: str, what: str) -> A:
    """Parse the words of a command. For help, tyro ends the process. Raises ScheduleError with all mistakes."""
    known = "\n".join(f"  {name:<14} {entry.summary}" for name, entry in CATALOG.items())
    missing = f"a schedule is missing: give raypar {command} a name, such as 1f1b, or FILE.csv or FILE.py:FUNCTION"
    try:
        return parse_command(kind(""), words, command, f"{what}\n\nSchedules:\n{known}", missing)
    except ConfigError as error:
        raise ScheduleError("\n".join(error.faults)) from error


def _load(args: PaperArgs, costs: Costs | None = None, most_cells: int = MOST_CELLS) -> Loaded:
    """Load the schedule, of a synchronous one as many steps as the flags say. Raises ScheduleError."""
    loaded = load_sized(args.schedule, args, costs, most_cells)
    return loaded if args.steps is None or loaded.schedule.stream else loaded.without_flush(args.steps)


def _warn_of_faults(word: str, loaded: Loaded) -> None:
    """Log why a schedule of the user's, which is drawn, could not run; those of the catalog can."""
    if word in CATALOG:
        return
    try:
        loaded.lowered()
    except ScheduleError as error:
        logging.getLogger("raypar").warning("it is drawn, but it can't run: raypar check says\n%s", error)


def _passes(args: PaperArgs) -> tuple[Pass, ...]:
    """Return the passes that the flags ask for. Raises ScheduleError if a flag of a gather comes without one."""
    if args.gather is None:
        if args.resident is not None:
            raise ScheduleError(f"--resident {args.resident} bounds what is gathered: add --gather step")
        if args.reshard_after_forward != "always":
            raise ScheduleError("--reshard-after-forward says when gathered weights are freed: add --gather microbatch")
        return _reductions(args)
    after = RESHARDS[args.reshard_after_forward]
    gather = partial(gather_weights, when=args.gather, reshard_after_forward=after, resident=args.resident)
    return (*_reductions(args), gather)


def _reductions(args: PaperArgs) -> tuple[Pass, ...]:
    return () if args.reduce is None else (partial(reduce_gradients, when=args.reduce),)


def _grid(schedule: Schedule, terminal: bool) -> str:
    width = shutil.get_terminal_size().columns if terminal else WIDTH
    return text(schedule, color=terminal, width=width, whole=_WHOLE)


def _rows(schedule: Schedule, terminal: bool) -> str:
    """Return every row as a line. A column is a position in the row, not a time; a terminal has those that fit."""
    rows = [[str(action) for action in row] for row in schedule.rows]
    labels = [schedule.label(rank) for rank in range(schedule.num_ranks)]
    cell, longest = widest(cell for row in rows for cell in row), max(map(len, rows))
    shown = longest
    if terminal:
        shown = max(1, (shutil.get_terminal_size().columns - widest(labels) - 2) // (cell + 1))
    left_out = f"(left out: actions {shown} to {longest - 1} of {longest}; {_WHOLE} draws all)"
    picture = lines(labels, padded((row[:shown] for row in rows), cell))
    return "\n".join([*picture, left_out] if shown < longest else picture)


def _of_each_stage(schedule: Schedule) -> str:
    """Return whose costs are given, in words, if a rank has several stages; makespans of others do not compare then."""
    most = max(len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks))
    return f" of each of a rank's {most} stages (raypar gallery divides them by {most})" if most > 1 else ""


def _sizes(schedule: Schedule) -> str:
    counts = f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.microbatches_a_step} microbatches"
    counts += f" in {schedule.slices} slices" if schedule.slices > 1 else ""
    counts += f" a step, {schedule.stream} steps" if schedule.stream else ""
    return f"{schedule.name}, {counts}"
