"""The command that trains: ``raypar train``, its flags, dry runs, and the choice of a microbatch.

Its flags are the fields of Run, and some of its own. A dry run writes nothing: tokens that the user's cache does not
have are converted into a folder that is removed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import tyro

from raypar.actors.data.text.text_files import is_converted
from raypar.actors.machine.files import expanded
from raypar.actors.machine.this_machine import starts_own_ray
from raypar.actors.specs.data import Examples, Text
from raypar.actors.specs.injected_fault import InjectedFault
from raypar.actors.specs.run import Run
from raypar.actors.specs.worlds import world_of
from raypar.cli.train.mesh_origins import mesh_origins, too_many_actors
from raypar.cli.train.resuming import (
    begins_again,
    begins_anew,
    begun_by,
    finished,
    how_to_go_on,
    its_run,
    resume_faults,
    typed_checkpoint,
)
from raypar.cli.train.samples import sample_faults, sampling
from raypar.cli.words.output_files import growing_file, output_file_faults, whole_file
from raypar.cli.words.parsing import parse, values_of
from raypar.cli.words.run_args import RunArgs
from raypar.config.conflicts.outputs import run_folder_faults
from raypar.config.conflicts.parallel import idle_fields
from raypar.config.conflicts.system import device_faults
from raypar.config.fields import FieldFault, field_faults, right_fields
from raypar.config.run import check_run
from raypar.errors import TO_GO_ON, ConfigError
from raypar.job.recover.chaos import faults_in, injectable, never_happen
from raypar.job.start.launchable import check_launch
from raypar.log_details import DETAIL
from raypar.paths import AUTO, absolute
from raypar.planner.calibrated.calibration_file import calibration_faults, calibration_named
from raypar.planner.resource_needs import TOO_MUCH, Rows
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.loss_text import loss_text
from raypar.reporting.progress import evaluation_line
from raypar.reporting.report import Report
from raypar.reporting.scale_warnings import unchanged
from raypar.reporting.screen import PathFigure
from raypar.reporting.summary import closing_rows, failures_summary, plan_rows, planned_grid
from raypar.reporting.tables.expert_table import expert_table
from raypar.schedules.drawing.chrome_trace import chrome_trace
from raypar.schedules.reading.user_code import names_code
from raypar.schedules.schedule import Schedule

if TYPE_CHECKING:
    from raypar.checkpoint.find import VerifiedCheckpoint
    from raypar.job.job import Job

_MOST_ROOM = 1_000_000  # GiB of an actor


@contextmanager
def sparing_cache(run: Run) -> Iterator[Run]:
    """Give a run that leaves the cache folder of its text as it is, if the user has named one.

    A folder that can't be written stays the run's, so that its check says so.

    Args:
        run: The run.
    """
    text = run.data
    if (
        not isinstance(text, Text)
        or not right_fields([*field_faults(run)])("data")
        or text.cache is None
        or not _is_writable(text.cache)
        or is_converted(text)
    ):
        yield run
        return
    with TemporaryDirectory(prefix="raypar-") as folder:
        yield replace(run, data=replace(text, cache=folder))


def _is_writable(folder: str) -> bool:
    """Return whether a folder could be made and written to."""
    try:
        path = expanded(folder).absolute()
        above = next(one for one in (path, *path.parents) if os.path.lexists(one))
    except (OSError, RuntimeError, ValueError):
        return False
    return Path(above).is_dir() and os.access(above, os.W_OK | os.X_OK)


def chosen(run: Run, schedule: Schedule, *, wanted: bool, probes: bool, room: float = 0.0) -> tuple[Run, Schedule]:
    """Return a run with the largest microbatch that fits, and the schedule of its step.

    Args:
        run: The run, which was checked.
        schedule: The lowered schedule of its training step.
        wanted: Whether the microbatch is to be chosen; otherwise both are returned as they are.
        probes: Whether a step is measured on actors, and not forecast only.
        room: GiB that each actor may take; 0: an equal part of what is free here.

    Raises:
        ConfigError: No microbatch fits.
        JobError: A probe failed.
    """
    if not wanted:
        return run, schedule
    from raypar.job.microbatch import fit_microbatch, measured_peak

    found = fit_microbatch(run, max(1, round(room * 2**30)) if room else None, measured_peak if probes else None)
    for finding in found.findings:
        logging.getLogger("raypar").info("auto-microbatch: %s", finding)
    return found.run, check_run(found.run)["train"]


def convert_data(run: Run) -> None:
    """Convert the data of a run on a cluster, if RAY_ADDRESS names one; see ``convert_on_cluster``.

    Args:
        run: The run, which may have faults.
    """
    if not starts_own_ray():
        from raypar.job.start.conversion import convert_on_cluster  # imports torch and Ray

        convert_on_cluster(run)


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
    chaos: Path | None = None
    """TOML file of faults that are injected on purpose, to see that the run survives them (max_failures)"""
    sample_every: int = 0
    """go on with two pieces of the validation text after every so many steps; 0: never"""
    calibration: Path | None = None
    """what raypar calibrate wrote, from which steps are predicted; none: where it writes it if nothing else is said"""
    auto_microbatch: tyro.conf.FlagCreatePairsOff[bool] = False
    """take the largest microbatch that fits: by the forecast, then by steps on actors; a step keeps its samples"""
    room: float = 0.0
    """GiB that each actor may take with --auto-microbatch, as on GPUs; 0: an equal part of what is free here"""
    wait_for_nodes: float = 0.0
    """seconds to wait for nodes if the cluster has too few CPUs, or loses those that the run needs (max_failures)"""
    wait_for_room: float = 60.0
    """seconds to wait for CPUs and GPUs that others have; then the exit code is 5, and a later try may succeed"""


@dataclass(frozen=True)
class DryRunOutcome:
    """Outcome of a dry run.

    Attributes:
        picture: The schedule as text, and who has which experts if actors divide them.
        rows: Names and figures of the run.
        elsewhere: Whether it is a plan for other machines than this one.
    """

    picture: str
    rows: Rows
    elsewhere: bool = False

    @property
    def verdict(self) -> str:
        """Say whether and where the run can start, and whether what it needs is free."""
        if any(TOO_MUCH in figure for _, figure in self.rows):
            return "no mistake is in this run, but it needs more than is free here"
        return "ok: this run can start" + (" on other machines, but not here" if self.elsewhere else "")


@dataclass(frozen=True)
class Finished:
    """Outcome of a run that took all its steps.

    Attributes:
        rows: Names and figures of the run.
        lost: What is missing of what the run should have left, and how to go on; "" if nothing is.
        follow: The command that shows the run; "" if nothing was kept.
    """

    rows: Rows
    lost: str
    follow: str = ""


def train(words: Sequence[str], terminal: bool, start: Run | None = None) -> DryRunOutcome | Finished:
    """Run ``raypar train``.

    Args:
        words: The words after ``train``.
        terminal: Whether to draw a dry run's schedule in colours.
        start: The run that the flags change if the words name none; None for gpt-small.

    Returns:
        The figures of the completed run, or the plan of a dry run.

    Raises:
        ConfigError: The flags or files have faults; no actor was started.
        JobError: The run failed.
        NonFiniteError: The gradients became infinite or NaN.
    """
    begun, unfound = begun_by(words)
    launches = list[float]()
    known = {} if begun is None else {str(begun.path): its_run(begun, typed_checkpoint(words))}
    known |= {} if start is None else {"sft": start}
    what = "Train a model on actors."
    base = next(iter(known), "gpt-small")
    parsed = parse(TrainArgs, words, "train", what, base, known=known, defaults={"folder": _default_folder()})
    args, run = parsed.args, parsed.args.run()
    whole = unfound and args.base == "gpt-small" and "gpt-small" not in words  # then it is not known what is to go on
    wrong = [*(FieldFault("" if whole else "folder", text, of_type=True) for text in unfound), *parsed.wrong]
    if args.base in known and names_code(args.schedule) and not [*values_of("--schedule", words)]:
        text = f"schedule {args.schedule!r} is code, and the checkpoint alone can't make it run"
        wrong.append(FieldFault("schedule", f"{text}: if you trust it, say --schedule {args.schedule}", of_type=True))
    if args.dry_run:
        with sparing_cache(run) as run, calibration_named(args.calibration):
            schedule = _checked(run, args, begun, wrong, words)
            run, schedule = chosen(run, schedule, wanted=args.auto_microbatch, probes=False, room=args.room)
            taken = 0 if begun is None else begun.manifest.step
            return _planned(run, schedule, mesh_origins(args, words), taken, color=terminal)
    chosen_folder = run.folder == AUTO
    try:
        schedule = _checked(run, args, begun, wrong, words)
        run, schedule = chosen(run, schedule, wanted=args.auto_microbatch, probes=True, room=args.room)
        for axis, origin in mesh_origins(args, words).items():  # the log says later how many actors that makes
            logging.getLogger("raypar").info(
                "mesh.%s is %s, from %s", axis, getattr(run.mesh, axis), origin, extra=DETAIL
            )
        from raypar.job.start.run_folders import settled  # imports what mistakes and dry runs do not need

        run = settled(run)
        with calibration_named(args.calibration):
            return _trained(run, args, schedule, begun, launches, may_lack_folder=chosen_folder)
    except ConfigError:
        raise
    except BaseException as error:  # a signal during the launch may be another error, of Ray's
        how = how_to_go_on(run, is_new=chosen_folder) if launches else ""
        how = how or (begins_anew(run, is_new=chosen_folder) if begun is None else begins_again(begun, words))
        notes = [note for note in getattr(error, "__notes__", []) if not note.startswith(TO_GO_ON)]
        error.__notes__ = [*notes, how] if how else notes
        raise


def _planned(run: Run, schedule: Schedule, origins: Mapping[str, str], step: int, *, color: bool) -> DryRunOutcome:
    """Make the plan of a run that was checked and goes on after a step; log what has no effect."""
    for idle in idle_fields(run):
        logging.getLogger("raypar").warning("%s", idle)
    if isinstance(run.data, Examples):
        from raypar.job.start.batch_checks import warn_of_examples  # imports torch

        warn_of_examples(run.data, run.model.seq or 1)
    rows = plan_rows(run, schedule, origins=origins, step=step)
    pictures = planned_grid(schedule, dict(rows)["bubble"], color=color), expert_table(run)
    return DryRunOutcome("\n\n".join(filter(None, pictures)), rows, any(device_faults(run.device)))


def _checked(
    run: Run, args: TrainArgs, begun: VerifiedCheckpoint | None, wrong: Sequence[FieldFault], words: Sequence[str]
) -> Schedule:
    """Check everything about a command that trains, and return the schedule of a step.

    Args:
        run: The run.
        args: The flags.
        begun: The checkpoint to continue from; None for a new run.
        wrong: Faults of the words, and of the files that they name.
        words: The words that say so.

    Raises:
        ConfigError: There are faults. The error lists all of them.
    """
    right = right_fields([*wrong, *field_faults(run)])
    others = [*output_file_faults("--log", args.log), *output_file_faults("--trace", args.trace)]
    others += calibration_faults(args.calibration)
    if right("model", "data", "mesh"):
        others += sample_faults(run, args.sample_every)
    if args.overwrite and run.folder is None:
        others.append("--overwrite replaces the run in a folder, and there is none: give --folder")
    if begun is not None and right("steps") and begun.manifest.step >= run.steps:
        others.append(finished(begun, run.steps, words))
    elsewhere = [*device_faults(run.device)] if right("device") else []  # what a dry run says of another machine
    on_paper = bool(elsewhere) and args.dry_run
    if on_paper:
        logging.getLogger("raypar").warning("this is a plan for other machines: %s", elsewhere[0])
    else:
        others += elsewhere
    for flag, seconds in (("nodes", args.wait_for_nodes), ("room", args.wait_for_room)):
        if not 0 <= seconds < math.inf:
            others.append(f"--wait-for-{flag} is {seconds}: it must be a number of seconds, 0 or more")
    if not 0 <= args.room <= _MOST_ROOM:
        others.append(f"--room is {args.room}: it must be a number of GiB, 0 to {_MOST_ROOM:,}")
    elif args.room and not args.auto_microbatch:
        others.append("--room is for --auto-microbatch: give that as well, or leave it out")
    if not on_paper and right("mesh", "data_parallel", "servers", "zero", "spares") and not [*run.mesh.count_faults()]:
        others += too_many_actors(run, mesh_origins(args, words), run.spares)
    schedule, faults = None, list[str]()
    try:
        schedule = check_launch(
            run,
            None if begun is None else begun.path,
            overwrite=args.overwrite,
            wrong=wrong,
            others=others,
            convert=(lambda _: None) if args.dry_run else convert_data,
        )["train"]
    except ConfigError as error:
        faults = error.faults
    faults += injected(args.chaos, run, schedule, begun)[1]
    if (faults or args.dry_run) and right("folder"):  # otherwise the launch looks for them
        faults += resume_faults(run, begun, args.overwrite, is_sound=schedule is not None)
    if faults or schedule is None:
        raise ConfigError(faults)
    return schedule


def _default_folder() -> str:
    """Return the folder of a run whose words and file name none: a new one below runs/, or none if that can't be."""
    return "none" if [*run_folder_faults(AUTO, None)] else AUTO


def _trained(
    run: Run,
    args: TrainArgs,
    schedule: Schedule,
    begun: VerifiedCheckpoint | None,
    launches: list[float],
    *,
    may_lack_folder: bool,
) -> Finished:
    """Train a run that was checked, with the files that flags ask for.

    Args:
        run: The run.
        args: The flags.
        schedule: The schedule of a step.
        begun: The checkpoint to continue from; None for a new run.
        launches: Gets the seconds of the launch.
        may_lack_folder: Whether nodes may lack the run's folder, which nobody has named.
    """
    from raypar.cluster.lifecycle.ray_cluster import Waits  # imports torch and Ray
    from raypar.job.launch import launch_in
    from raypar.reporting.run_folder.metrics_line import metrics_line

    began = time.perf_counter()
    with (
        growing_file("--log", args.log) as log,
        whole_file("--trace", args.trace) as trace,
        launch_in(
            run,
            Waits(args.wait_for_nodes, args.wait_for_room),
            begun,
            overwrite=args.overwrite,
            chaos=injected(args.chaos, run, schedule, begun)[0],
            may_lack_folder=may_lack_folder,
        ) as job,
    ):
        sample = sampling(job, args.sample_every)

        def write(outcome: Report | Evaluation) -> None:
            log(metrics_line(outcome.to_dict()))
            sample(outcome)

        launches.append(launched := time.perf_counter() - began)
        reports = job.train(on=write, ahead=int(not args.sample_every))
        if args.trace is not None:
            trace(json.dumps(chrome_trace(*job.timelines())))
        overlay = job.overlay()
        evaluation = job.evaluate()
        write(evaluation)
        averaged = None if run.ema is None else job.evaluate(ema=True)
        for one in (evaluation, averaged):
            if one is not None:
                logging.getLogger("raypar").info("%s", evaluation_line(one))
        wall = time.perf_counter() - began
        files = {"log": args.log, "trace": args.trace}
        rows = closing_rows(run, schedule, reports, evaluation, launched, wall, files, overlay)
        return _ended(run, job, [*rows, *_averages(averaged)], reports, begun)


def _averages(evaluation: Evaluation | None) -> Rows:
    return [] if evaluation is None else [("validation loss of the averages", loss_text(evaluation.loss))]


def _ended(run: Run, job: Job, rows: Rows, reports: Sequence[Report], begun: VerifiedCheckpoint | None) -> Finished:
    """Return the outcome of a run that took all its steps, with what it survived and where all of it is kept."""
    if job.failures:
        rows = [*rows, ("failures survived", failures_summary(reports, [failure.lost for failure in job.failures]))]
    if job.saved is not None:
        rows = [*rows, ("newest checkpoint", PathFigure(_as_typed(job.saved, run.folder)))]
    rows = [*rows, ("kept in", _kept_in(run, job.run))]
    follow = "" if run.folder is None else f"raypar report {shlex.quote(run.folder)}"
    if unchanged(run, reports) is not None:
        return Finished(rows, "the run has changed no weight (see above)", follow)
    return Finished(rows, "" if job.lost is None else _lost_text(job, begun), follow)


def _as_typed(checkpoint: Path, folder: str | None) -> Path:
    """Return the path of a checkpoint, relative if it is in a run folder that the user calls by a relative path."""
    if folder is None or not checkpoint.is_relative_to(absolute(folder)):
        return checkpoint
    return Path(folder) / checkpoint.relative_to(absolute(folder))


def _kept_in(run: Run, of_job: Run) -> str:
    """Say where everything of a run is that was kept.

    Args:
        run: The run.
        of_job: The run as its job has it, without a folder if not all nodes see that.
    """
    if run.folder is None:
        return "nothing was kept (folder none): --folder FOLDER keeps it"
    return PathFigure(f"{run.folder}{'' if of_job.folder else ', without checkpoints: not all nodes see it'}")


def injected(
    file: Path | None, run: Run, schedule: Schedule | None, begun: VerifiedCheckpoint | None
) -> tuple[list[InjectedFault], list[str]]:
    """Read the faults that are injected into a run on purpose; return them, and what is wrong with them.

    Args:
        file: Their file; None for no faults.
        run: The run.
        schedule: The schedule of its training step; None if the run has mistakes. Then only the file is looked at.
        begun: The checkpoint that the run goes on from; None for a new run.
    """
    try:
        named = [] if file is None else faults_in(file)
    except ConfigError as error:
        return [], error.faults
    if schedule is None:
        return [], []
    found, wrong = injectable(named, world_of(run), schedule)
    return found, [*wrong, *never_happen(found, run, 0 if begun is None else begun.manifest.step)]


def _lost_text(job: Job, begun: VerifiedCheckpoint | None) -> str:
    """Describe a run whose last checkpoint is missing, and which began with a checkpoint or without one."""
    lost = f"the run took all its steps, but its weights after step {job.run.steps} are not saved (see above)"
    saved, folder = job.saved, job.run.folder
    if saved is None and begun is not None and folder is not None:
        saved = begun.path if begun.path.is_relative_to(absolute(folder)) else None
    if saved is None:
        return f"{lost}, and no others are: mend that and train again"
    return f"{lost}: mend that and go on from {saved.name} with raypar train --resume {folder}"
