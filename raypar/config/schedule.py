"""Turn a run's ``schedule`` into the programs that actors perform: load it, apply every pass, then check the result."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

from raypar.actors.specs.types import SEND_WINDOW, Backward, ProgramName
from raypar.errors import ConfigError
from raypar.schedules.action import Op
from raypar.schedules.catalog import build, entry_of
from raypar.schedules.checking.counterexample import Generate, demand_sound
from raypar.schedules.passes.first_steps import first_steps
from raypar.schedules.passes.gather_weights import GatherWhen, ReshardAfterForward, gather_weights
from raypar.schedules.passes.lower import Order, lower
from raypar.schedules.passes.offload_activations import offload_activations
from raypar.schedules.passes.reduce_gradients import ReduceWhen, reduce_gradients
from raypar.schedules.passes.replicate import replicate
from raypar.schedules.passes.skip_connections import Skips, no_skips, with_skips
from raypar.schedules.passes.split_backward import split_backward
from raypar.schedules.passes.token_slices import with_slices
from raypar.schedules.passes.without_flush import without_flush
from raypar.schedules.reading.torch_csv import from_csv
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.simulation.simulate import Costs

Programs = Mapping[ProgramName, Schedule]
Pass = Callable[[Schedule], Schedule]

MOST_BYTES = 128 << 20  # largest CSV file
MOST_CELLS = 50_000  # most microbatches x stages; lowering and checking takes about 900 bytes and 40 us for each


def programs_of(
    schedule: str | Schedule,
    ranks: int,
    microbatches: int,
    chunks: int | None,
    *,
    steps: int | None = None,
    reduce_grad: bool = False,
    costs: Costs | None = None,
    replicas: Sequence[int] = (),
    skips: Callable[[int], Skips] = no_skips,
    slices: int = 1,
) -> Programs:
    """Return the lowered and checked programs of a run, which ``with_backward`` and ``with_zero`` may change.

    The evaluation has the same forwards as the training step, in the same order, and no backwards.

    Args:
        schedule: A name, user code, a CSV file, or a Schedule; see ``load``.
        ranks: Number of pipeline ranks.
        microbatches: Number of microbatches in a step of one replica.
        chunks: Stages on each rank; None for the schedule's default.
        steps: Steps of an asynchronous schedule from one flush to the next; None for the default.
        reduce_grad: Whether every stage reduces its gradients once a step, because there are replicas or parameter
            servers.
        costs: How long actions last, for a schedule that depends on it; None for its default.
        replicas: The number of replicas of each rank, among which microbatches go in turn; empty: one each.
        skips: Returns the pairs of stages between which there are skips, for a number of stages.
        slices: In how many slices each microbatch is cut; see ``with_slices``.

    Raises:
        ScheduleError: There is no such schedule, it does not fit the sizes, or it breaks a rule.
    """
    loaded = load(schedule, ranks, microbatches * slices, chunks, costs, steps, replicas=replicas).in_slices(slices)
    if steps is not None and not loaded.schedule.stream:
        loaded = loaded.without_flush(steps)
    loaded = loaded.skipping(skips)
    train = loaded.schedule
    if train.forward_only:
        raise ScheduleError(f"schedule {train.name!r} has no backward: it can evaluate but not train; use 1f1b, say")
    # Before its sizes, because no sizes fit an impossible schedule.
    lowered = loaded.lowered(reduce_grad=reduce_grad)
    _demand_sizes(train, ranks, microbatches, replicas, slices)
    one = first_steps(train, 1) if train.stream else train
    forwards = ([action for action in row if action.op is Op.F] for row in one.rows)
    forward = replace(Schedule.of(f"{train.name} forwards", forwards), slices=train.slices)
    evaluate = Loaded(forward).skipping(skips).lowered()
    return {"train": lowered, "evaluate": evaluate}


def _demand_sizes(schedule: Schedule, ranks: int, microbatches: int, replicas: Sequence[int], slices: int) -> None:
    """Raise ScheduleError if a schedule has other sizes than a run, with all that must be set."""
    are, fixes = [], []
    if (own := schedule.num_pipeline_ranks) != ranks:
        are.append("1 rank" if own == 1 else f"{own} ranks")
        fixes.append(f"mesh.pp to {own}")
    if (own := schedule.microbatches_a_step) != microbatches:
        are.append("1 microbatch" if own == 1 else f"{own} microbatches")
        fixes.append(f"microbatches to {own}")
    if schedule.slices != slices:
        are.append(f"{schedule.slices} slices of a microbatch")
        fixes.append(f"token_slices to {schedule.slices}")
    if schedule.replicas not in ((), tuple(replicas)):
        are.append(f"{'-'.join(map(str, schedule.replicas))} replicas")
        fixes.append(f"mesh.rank_dp to {schedule.replicas}")
    if are:
        raise ScheduleError(f"schedule {schedule.name!r} is for {' and '.join(are)}: set {' and '.join(fixes)}")


def with_backward(programs: Programs, backward: Backward, costs: Costs, *, hold: bool) -> Programs:
    """Return the programs with backwards of the training step split into I and W, checked again.

    Args:
        programs: Lowered and checked programs.
        backward: "auto" splits backwards where that makes the step shorter, "split" splits all, "whole" none.
        costs: Estimated durations of the actions of the training step.
        hold: Whether a W may come later than the SEND of its I; see ``split_backward``.

    Raises:
        ScheduleError: The new rows break a rule, which would be a bug of the pass.
    """
    if backward == "whole" or programs["train"].stream:
        return programs
    return _with_train(programs, split_backward(programs["train"], costs, every=backward == "split", hold=hold))


def with_offload(programs: Programs, most: int | None) -> Programs:
    """Return the programs with OFFLOAD and RELOAD in the training step, so that a device holds few activations.

    Args:
        programs: Lowered and checked programs.
        most: The most activations on a device; None for no limit.

    Raises:
        ConfigError: Its order needs more, or does not allow moving activations.
    """
    try:
        train = offload_activations(programs["train"], most)
    except ScheduleError as error:
        raise ConfigError([f"activations_on_device is {most}: {error}"]) from None
    return _with_train(programs, train)


def _with_train(programs: Programs, train: Schedule) -> Programs:
    """Return the programs with another training step, checked if it is new. Raises ScheduleError."""
    if train is not programs["train"]:
        demand_sound(train, send_capacity=SEND_WINDOW)
    return {**programs, "train": train}


@dataclass(frozen=True)
class ZeroActions:
    """When replicas that share out gradients and weights reduce the former and gather the latter.

    Attributes:
        reduce: How often a stage's gradients are reduced; None if they are not.
        gather: For how long a stage's weights are whole; None if they always are.
        reshard_after_forward: Whether weights are freed between forward and backward; see ``gather_weights``.
        resident: Most stages of a rank that are whole at once; None for no limit.
    """

    reduce: ReduceWhen | None = None
    gather: GatherWhen | None = None
    reshard_after_forward: ReshardAfterForward = True
    resident: int | None = None


def with_zero(programs: Programs, zero: ZeroActions) -> Programs:
    """Return the programs with REDUCE_GRAD, UNSHARD and RESHARD where they have none, checked again.

    Args:
        programs: Lowered and checked programs, whose backwards are split as they will be run.
        zero: When to reduce and to gather.

    Raises:
        ScheduleError: The sizes do not fit, or the new rows break a rule, which would be a bug of the pass.
    """
    if zero.gather is None and zero.reduce in (None, "step"):
        return programs
    made: dict[ProgramName, Schedule] = {}
    for name, schedule in programs.items():
        if zero.reduce is not None:
            schedule = reduce_gradients(schedule, zero.reduce)
        if zero.gather is not None:
            schedule = gather_weights(
                schedule,
                zero.gather,
                reshard_after_forward=zero.reshard_after_forward,
                resident=zero.resident,
            )
        demand_sound(schedule, send_capacity=SEND_WINDOW)
        made[name] = schedule
    return made


@dataclass(frozen=True)
class Loaded:
    """A schedule and its generator.

    Attributes:
        schedule: The schedule, usually of compute actions only.
        generate: Generates it for other sizes, to find a smaller counterexample; None if only the rows are known.
    """

    schedule: Schedule
    generate: Generate | None = None

    def passed(self, change: Pass, smaller: Callable[..., Schedule] | None = None) -> Loaded:
        """Return the schedule after a pass, with a generator whose schedules are changed in the same way.

        Args:
            change: The pass. Raises ScheduleError if it does not fit the schedule.
            smaller: Generates the schedule that the pass changes, for other sizes; None for the generator's own.
        """
        generate = smaller or self.generate
        return Loaded(change(self.schedule), generate and (lambda *sizes: change(generate(*sizes))))

    def without_flush(self, steps: int) -> Loaded:
        """Return so many steps of a synchronous schedule as one stream. Raises ScheduleError if it can't be one."""
        return self.passed(lambda schedule: without_flush(schedule, steps))

    def in_slices(self, slices: int) -> Loaded:
        """Return the schedule for microbatches that are cut into slices. Raises ScheduleError if it can't be one."""
        if slices == self.schedule.slices:
            return self
        whole = self.generate
        smaller = whole and (lambda ranks, microbatches, chunks: whole(ranks, microbatches * slices, chunks))
        return self.passed(lambda schedule: with_slices(schedule, slices), smaller)

    def skipping(self, skips: Callable[[int], Skips]) -> Loaded:
        """Return the schedule with skips between its stages.

        Args:
            skips: Returns the pairs of stages for a number of stages; a smaller schedule has those that fit into it.
        """
        if not (pairs := skips(self.schedule.num_stages)):
            return self
        return self.passed(lambda one: with_skips(one, [pair for pair in pairs if pair[1] < one.num_stages]))

    def lowered(
        self,
        order: Order = "just_in_time",
        *,
        reduce_grad: bool = False,
        passes: Sequence[Pass] = (),
        send_capacity: int = SEND_WINDOW,
    ) -> Schedule:
        """Return the schedule, lowered and proved safe.

        Args:
            order: Where to insert the SENDs and RECVs; see ``lower``.
            reduce_grad: Whether to add REDUCE_GRAD for every stage, once a step.
            passes: Further passes, in their order, after lowering and before the proof.
            send_capacity: How many sends to a peer may be under way before a sender waits; 0 if sends block.

        Raises:
            ScheduleError: The schedule breaks a rule. The text also shows the smallest sizes that break it.
        """

        def full(schedule: Schedule) -> Schedule:
            return reduce(lambda rows, change: change(rows), passes, lower(schedule, order, reduce_grad=reduce_grad))

        try:
            lowered = self.passed(full)
        except ScheduleError:
            demand_sound(self.schedule, self.generate)  # its error says more: what is missing, and where
            raise
        demand_sound(lowered.schedule, lowered.generate, send_capacity=send_capacity)
        return lowered.schedule


def load(
    schedule: str | Schedule,
    ranks: int,
    microbatches: int,
    chunks: int | None,
    costs: Costs | None = None,
    steps: int | None = None,
    *,
    replicas: Sequence[int] = (),
    most_cells: int = MOST_CELLS,
) -> Loaded:
    """Load a schedule, without lowering or checking it.

    Args:
        schedule: A name of the catalog, code that generates it (``my.py:zigzag``), a CSV file, or a Schedule.
        ranks: Number of pipeline ranks to generate for. A file or a Schedule has its own sizes, so that these and the
            next two arguments do not matter.
        microbatches: Number of microbatches.
        chunks: Stages on each rank; None for the schedule's default.
        costs: How long actions last, for a schedule that depends on it; None for its default.
        steps: Number of steps of an asynchronous schedule, None for 8; others are one step.
        replicas: The number of replicas of each rank; empty: one each. A Schedule or a file may have their rows.
        most_cells: The most that ranks x microbatches x chunks may be.

    Raises:
        ScheduleError: There is no such schedule, it cannot have these sizes, the file can't be read, or the code fails.
    """
    if isinstance(schedule, Schedule):
        return Loaded(_with_replicas(schedule, replicas))
    path = Path(schedule)
    if path.suffix != ".csv":
        entry_of(schedule)
        if ranks * microbatches * (chunks or 1) * (steps or 1) > most_cells:
            sizes = f"{ranks} ranks x {microbatches} microbatches x {chunks or 1} chunks"
            sizes += f" x {steps} steps" if steps else ""
            raise ScheduleError(f"schedule {schedule!r}: {sizes} are more than {most_cells}: use smaller numbers")

        def generate(ranks: int, microbatches: int, chunks: int | None) -> Schedule:
            counts = replicas[:ranks] if ranks <= len(replicas) else replicas
            return build(str(schedule), ranks, microbatches, chunks, steps, costs=costs, replicas=counts)

        return Loaded(generate(ranks, microbatches, chunks), generate)
    from raypar.actors.machine.files import read_named

    try:
        return Loaded(_with_replicas(from_csv(read_named(path, MOST_BYTES).decode(), path.stem), replicas))
    except OSError as error:
        raise ScheduleError(f"schedule file {schedule!r} can't be read ({error.strerror}): correct the path") from error
    except ScheduleError:
        raise
    except (ValueError, csv.Error) as error:  # not UTF-8, or a NUL in the path
        raise ScheduleError(f"schedule file {schedule!r} is not a CSV text ({error}): write one with to_csv") from error


def _with_replicas(schedule: Schedule, replicas: Sequence[int]) -> Schedule:
    """Return a schedule with these replicas, unless it has replicas already."""
    return replicate(schedule, replicas) if any(count > 1 for count in replicas) and not schedule.replicas else schedule


def takes_costs(schedule: str | Schedule) -> bool:
    """Return whether a right schedule depends on how long actions last."""
    return isinstance(schedule, str) and Path(schedule).suffix != ".csv" and entry_of(schedule).takes_costs


def schedule_faults(schedule: str | Schedule) -> list[str]:
    """Return the faults of a run's ``schedule`` that do not depend on the (perhaps wrong) sizes of the run."""
    try:
        if isinstance(schedule, str) and Path(schedule).suffix != ".csv":
            entry_of(schedule)
        else:
            load(schedule, 1, 1, None)
    except ScheduleError as error:
        return [str(error)]
    return []


def only_row(schedule: Schedule, rank: int) -> Schedule:
    """Return the schedule with the rows of all other ranks empty, which is what one actor needs."""
    return replace(schedule, rows=tuple(row if i == rank else () for i, row in enumerate(schedule.rows)))
