"""The commands that train: ``raypar train``, ``verify`` and ``step``. Their flags are the fields of Run."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import tyro

from raypar.actors.errors import CheckpointError, NonFiniteError
from raypar.actors.mesh.mesh import AXES
from raypar.actors.specs.data import Text
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.optim import AdamW, AnyOptimizer
from raypar.actors.specs.run import Run
from raypar.cli.flag_values import value_faults
from raypar.cli.flag_words import read_none, read_precision, with_experts
from raypar.cli.foreign_flags import foreign_faults
from raypar.cli.output_files import file_faults, growing_file, whole_file
from raypar.cli.plan import compared
from raypar.cli.resuming import how_to_go_on, its_run, misfits
from raypar.config.recipes import RECIPES
from raypar.config.run import check_run, unrecorded, world_of
from raypar.config.toml import of_kind, read_table, run_of
from raypar.config.validate.parallel import idle_fields
from raypar.errors import ConfigError, JobError
from raypar.paths import RUN, absolute, checkpoints_in, holds_run
from raypar.planner.host import room_faults
from raypar.reporting.needs import Rows, memory_faults
from raypar.reporting.report import Evaluation, Report
from raypar.reporting.summary import closing_rows, plan_rows, planned_grid
from raypar.schedules.drawing.chrome_trace import chrome_trace
from raypar.schedules.schedule import Schedule
from raypar.schedules.user_code import names_code

if TYPE_CHECKING:
    from raypar.checkpoint.find import Found
    from raypar.job.job import Job
    from raypar.parity.verify import Verdict

A = TypeVar("A", bound="RunArgs")

_VERIFIED_STEPS = 5


@dataclass(frozen=True)
class RunArgs(Run):
    """A Run restricted to what a command line can express, without functions, plus the run to start from."""

    model: GPT | Llama = field(default_factory=GPT)
    schedule: str = "1f1b"
    """naive, gpipe, 1f1b, interleaved, a CSV file, or code of yours as my.py:function; see raypar draw --help"""
    data: Text = field(default_factory=Text)
    optim: AnyOptimizer = field(default_factory=AdamW)
    base: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE|FILE.toml")] = ""
    """the run that the flags change: gpt-tiny, gpt-small, gpt-124m, llama-tiny, llama-small, moe-tiny, moe-small, or a
    TOML file"""

    def run(self) -> Run:
        """Return the Run alone."""
        return Run(**{field.name: getattr(self, field.name) for field in fields(Run)})


@dataclass(frozen=True)
class TrainArgs(RunArgs):
    """The flags of ``raypar train``."""

    log: Path | None = None
    """file for one line of JSON per step and per evaluation; overwritten if it exists"""
    trace: Path | None = None
    """file for the trace of the last step, for ui.perfetto.dev; overwritten if it exists"""
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False
    """check everything, draw the schedule, say what the run needs and what is here, but start no actor"""
    resume: Path | None = None
    """continue from this checkpoint, or from the newest sound one of this folder or run folder; without
    RECIPE|FILE.toml also with its run, and in its run folder"""
    overwrite: tyro.conf.FlagCreatePairsOff[bool] = False
    """replace the run that is in the folder, which is removed once the new one has begun"""
    wait_for_nodes: float = 0.0
    """seconds to wait for the cluster's autoscaler if the cluster has too few CPUs"""


@dataclass(frozen=True)
class Plan:
    """Outcome of a dry run.

    Attributes:
        picture: The schedule as text.
        rows: Names and figures of the run.
    """

    picture: str
    rows: Rows


@dataclass(frozen=True)
class Finished:
    """Outcome of a run that took all its steps.

    Attributes:
        rows: Names and figures of the run.
        lost: What is missing of what the run should have left, and how to go on; "" if nothing is.
    """

    rows: Rows
    lost: str


def train(words: Sequence[str], terminal: bool) -> Plan | Finished:
    """Run ``raypar train``.

    Args:
        words: The words after ``train``.
        terminal: Whether to draw a dry run's schedule in colours.

    Returns:
        The figures of the completed run, or the plan of a dry run.

    Raises:
        ConfigError: The flags or files have faults; no actor was started.
        JobError: The run failed.
        NonFiniteError: The gradients became infinite or NaN.
    """
    start = next((_found(path) for path in _values_of("--resume", words) if path), None)
    known = {} if start is None else {str(start.path): its_run(start)}
    args = _parse(TrainArgs, words, "train", "Train a model on actors.", next(iter(known), "gpt-small"), known=known)
    if args.base in known and names_code(args.schedule) and not [*_values_of("--schedule", words)]:
        fix = f"if you trust it, say --schedule {args.schedule}"
        raise ConfigError([f"schedule {args.schedule!r} is code, and the checkpoint alone can't make it run: {fix}"])
    run, faults = args.run(), [*file_faults("--log", args.log), *file_faults("--trace", args.trace)]
    try:
        schedule = check_run(run, None if start is None else start.path, overwrite=args.overwrite)["train"]
    except ConfigError as error:
        raise ConfigError([*error.faults, *faults]) from None
    if args.overwrite and run.folder is None:
        faults.append("--overwrite replaces the run in a folder, and there is none: give --folder")
    if start is not None and start.manifest.step >= run.steps:
        taken = f"{start.path.name} is of a run that has taken {start.manifest.step} steps, and --steps is {run.steps}"
        faults.append(f"{taken}: give more to go on")
    if not 0 <= args.wait_for_nodes < math.inf:
        faults.append(f"--wait-for-nodes is {args.wait_for_nodes}: it must be a number of seconds, 0 or more")
    faults += [*room_faults(world_of(run).size), *memory_faults(run, schedule)]
    if faults or args.dry_run:  # otherwise the launch looks for them
        faults += misfits(run, start, args.overwrite)
    if faults:
        raise ConfigError(faults)
    origins = _origins(args, words)
    if args.dry_run:
        for idle in idle_fields(run):
            logging.getLogger("raypar").warning("%s", idle)
        rows = plan_rows(run, schedule, origins=origins)
        return Plan(planned_grid(schedule, dict(rows)["bubble"], color=terminal), rows)
    for axis, origin in origins.items():  # the log says later how many actors that makes
        logging.getLogger("raypar").info("mesh.%s is %s, from %s", axis, getattr(run.mesh, axis), origin)
    from raypar.job.run_folders import settled  # imports what mistakes and dry runs do not need

    run, launches = settled(run), list[float]()
    try:
        return _trained(run, args, schedule, start, launches)
    except (JobError, NonFiniteError, KeyboardInterrupt, SystemExit) as error:
        if launches:
            error.add_note(how_to_go_on(run))
        raise


def _trained(run: Run, args: TrainArgs, schedule: Schedule, start: Found | None, launches: list[float]) -> Finished:
    """Train a run that was checked, with the files that flags ask for. ``launches`` gets the seconds of the launch."""
    from raypar.job.launch import launch  # imports torch and Ray

    began = time.perf_counter()
    with (
        growing_file("--log", args.log) as log,
        whole_file("--trace", args.trace) as trace,
        launch(run, wait_for_nodes=args.wait_for_nodes, resume=start, overwrite=args.overwrite) as job,
    ):

        def write(outcome: Report | Evaluation) -> None:
            log(json.dumps(outcome.to_dict()) + "\n")

        launched = time.perf_counter() - began
        launches.append(launched)
        try:
            reports = job.train(on=write, ahead=1)
        except KeyboardInterrupt:
            _keep(job)
            raise
        if args.trace is not None:
            trace(json.dumps(chrome_trace(*job.timelines())))
        overlay = job.overlay()
        evaluation = job.evaluate()
        write(evaluation)
        wall = time.perf_counter() - began
        files = {"log": args.log, "trace": args.trace, "folder": Path(run.folder) if run.folder else None}
        rows = closing_rows(run, schedule, reports, evaluation, launched, wall, files, overlay)
        if job.saved is not None:
            rows = [*rows, ("newest checkpoint", str(job.saved))]
        return Finished(rows, "" if job.lost is None else _told_lost(job))


def _told_lost(job: Job) -> str:
    """Describe a run whose last checkpoint is missing."""
    lost = f"the run took all its steps, but its weights after step {job.run.steps} are not saved (see above)"
    if job.saved is None:
        return f"{lost}, and no others are: free some room and train again"
    return f"{lost}: free some room and go on from {job.saved.name} with raypar train --resume {job.run.folder}"


def _keep(job: Job) -> None:
    """Save a checkpoint of an interrupted run, if it has a folder and its actors can still be called."""
    run, log = job.run, logging.getLogger("raypar")
    if run.folder is None or not job.next_step:
        return
    try:
        saved = job.save(checkpoints_in(absolute(run.folder)), run.keep_last)
    except (CheckpointError, JobError) as error:
        log.warning("interrupted, and nothing was saved: %s", error)
    else:
        log.info("saved as %s", saved.name)


def verify(words: Sequence[str]) -> Verdict:
    """Run ``raypar verify``: compare a run on actors with the same run in one plain process.

    The run may be that of a run folder, which is only read. Raises what ``train`` raises.
    """
    what = "Train a few steps on actors and in one plain process, and compare all losses, gradients and weights."
    run = unrecorded(_parse(RunArgs, words, "verify", what, "gpt-tiny", {"steps": _VERIFIED_STEPS}).run())
    _check(run)
    told = run.steps, world_of(run).size, run.mesh, run.schedule, run.microbatches
    logging.getLogger("raypar").info("%d steps in this process, then on %d actors: %s, %s of %d microbatches", *told)
    from raypar.parity.verify import verify as verified

    return verified(run)


def plan(words: Sequence[str]) -> str:
    """Run ``raypar plan``: say what a run takes at each level of ZeRO. Raises ConfigError if it has faults."""
    what = "Say what a run takes: memory by kind, and bytes sent, as it is and at each level of ZeRO."
    return compared(unrecorded(_parse(RunArgs, words, "plan", what, "gpt-small").run()))


def step(words: Sequence[str]) -> None:
    """Run ``raypar step``: a REPL for the run's first step. Raises what ``train`` raises."""
    what = "Step through a schedule by hand, on actors, in a Python REPL."
    run = _parse(RunArgs, words, "step", what, "gpt-tiny").run()
    _check(run)
    from raypar.cli.repl import interact
    from raypar.job.launch import launch

    with launch(run) as job:
        interact(job)


def _check(run: Run) -> None:
    """Raise ConfigError if a run has faults, or if this machine has no room for its actors."""
    check_run(run)
    if faults := list(room_faults(world_of(run).size)):
        raise ConfigError(faults)


def _origins(args: RunArgs, words: Sequence[str]) -> dict[str, str]:
    """Return, by axis of the mesh that no flag set, what made it more than 1: recipe, file or checkpoint."""
    kind = "file" if Path(args.base).suffix == ".toml" else "recipe" if args.base in RECIPES else "checkpoint"
    named = args.base if kind == "recipe" else Path(args.base).name
    ways = {axis: args.mesh.ways(axis) for axis in AXES}
    return {
        axis: f"{kind} {named}"
        for axis, count in ways.items()
        if count > 1 and not any(_values_of(f"--mesh.{axis}", words))
    }


def _found(path: str) -> Found:
    from raypar.checkpoint.resume import find  # imports numpy

    return find(Path(path))


def _parse(
    kind: type[A],
    words: Sequence[str],
    command: str,
    what: str,
    fallback: str,
    table: dict[str, int] | None = None,
    known: Mapping[str, Run] | None = None,
) -> A:
    """Parse the flags of a command.

    The run that the flags change, called the base, gives the flags their defaults, so it must be known first. It is
    usually the first word. If it turns out to be another word, parse again with that base.

    Args:
        kind: The class to parse.
        words: The words after the command.
        command: The command's name.
        what: What the command does, for its help.
        fallback: Name of the base if the words have none.
        table: Fields that change a recipe or a file's defaults.
        known: Further bases by name, beside recipes and files.
    """

    def parse(base: str) -> A:
        """Parse the words with this base. If they are wrong, tyro ends the process."""
        default = known[base] if known and base in known else _base(base, table or {})
        for model_kind in _values_of("--model.kind", words):
            default = replace(default, model=of_kind("model", model_kind, default.model))
        for optimizer_kind in _values_of("--optim.kind", words):
            default = replace(default, optim=of_kind("optim", optimizer_kind, default.optim))
        default = replace(default, model=with_experts(default.model, words))
        if faults := [*foreign_faults(words, default), *value_faults(kind, words, default)]:
            raise ConfigError(faults)
        parts = {field.name: getattr(default, field.name) for field in fields(Run)}
        parsed: A = tyro.cli(
            kind,
            config=(tyro.conf.AvoidSubcommands,),
            args=read_none(read_precision(words)),
            default=kind(**parts, base=base),
            prog=f"raypar {command}",
            description=f"{what} Flags change the recipe or the file; their defaults below are those of {base}.",
        )
        return parsed

    first = words[0] if words and not words[0].startswith("-") else fallback
    args = parse(first)
    return args if args.base == first else parse(args.base)


def _base(name: str, table: dict[str, int]) -> Run:
    if table and holds_run(Path(name)):  # of a run folder the run, but not how long it was
        return run_of(read_table(Path(name) / RUN) | table)
    if Path(name).suffix == ".toml":
        return run_of(table | read_table(Path(name)))
    try:
        return run_of({"recipe": name} | table)
    except ConfigError as error:
        other = "a file whose name ends in .toml" + (", or a run folder" if table else "")
        raise ConfigError([f"{fault}; or give {other}" for fault in error.faults]) from None


def _values_of(flag: str, words: Sequence[str]) -> Iterator[str]:
    for word, after in zip(words, [*words, ""][1:], strict=True):
        if word == flag:
            yield after
        elif word.startswith(f"{flag}="):
            yield word.partition("=")[2]
