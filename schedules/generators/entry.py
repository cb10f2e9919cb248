"""Catalog entries: a generator function, the sizes it accepts, and the check of the schedule that it returns."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.simulation.simulate import Costs

STREAM = 8  # default number of steps of an asynchronous schedule


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that a generator accepts. Any numbers of ranks and microbatches are, unless these fields limit them.

    Attributes:
        min_chunks: The fewest stages that a rank can hold.
        max_chunks: The most stages that a rank can hold, or None for no limit.
        one_a_rank: Whether there must be at least as many microbatches as ranks.
        multiple: The number of microbatches must be a multiple of this.
        hint: The advice of the error message when the number of chunks does not fit.
    """

    min_chunks: int = 1
    max_chunks: int | None = 1
    one_a_rank: bool = False
    multiple: int = 1
    hint: str = "leave chunks out, or use 'interleaved'"

    def demand(self, name: str, ranks: int, microbatches: int, chunks: int = 1) -> None:
        """Check sizes against these limits.

        Args:
            name: The schedule's name, for the error message.
            ranks: Number of pipeline ranks.
            microbatches: Number of microbatches in a step.
            chunks: Number of stages that each rank holds.

        Raises:
            ScheduleError: If a size does not fit. The text lists every fault and the fix for each.
        """
        faults = []
        if ranks < 1:
            faults.append(f"ranks={ranks}: a pipeline has at least one rank, set ranks to 1 or more")
        if microbatches < 1:
            faults.append(f"microbatches={microbatches}: a step has at least one, set microbatches to 1 or more")
        elif microbatches % self.multiple:
            near = microbatches + -microbatches % self.multiple
            faults.append(
                f"microbatches={microbatches}: {name} takes a multiple of {self.multiple}: set microbatches to {near}"
            )
        if chunks < self.min_chunks:
            faults.append(f"chunks={chunks}: {name} takes {self.min_chunks} or more stages a rank: {self.hint}")
        if self.max_chunks is not None and chunks > self.max_chunks:
            most = "1 stage" if self.max_chunks == 1 else f"{self.max_chunks} stages"
            faults.append(f"chunks={chunks}: {name} takes at most {most} a rank: {self.hint}")
        if self.one_a_rank and 1 <= microbatches < ranks:
            faults.append(
                f"microbatches={microbatches}: {name} needs at least one for each of {ranks} ranks, or the first ones "
                f"of a step would compute with weights that are not made yet: set microbatches to {ranks} or more"
            )
        if faults:
            raise ScheduleError(f"schedule {name!r} cannot be made: " + "; ".join(faults))


@dataclass(frozen=True, slots=True)
class Entry:
    """One schedule of the catalog.

    Attributes:
        generate: A function of ``(num_ranks, num_microbatches)``, or of ``(num_ranks, num_microbatches, num_chunks)``.
            It returns a Schedule (usually of compute actions only) or plain rows of Actions or of texts like "1F0".
            A keyword ``costs`` gets the durations of actions, or None. A keyword ``replicas`` gets the numbers of
            replicas of the ranks if these have several; the function then returns the rows of all replicas.
        summary: One line that says what the schedule is good for.
        sizes: The sizes that the function accepts.
        default_chunks: Number of stages on each rank if the user gives none.
        forward_only: Whether the schedule is an evaluation, which has no backward.
        is_stream: Whether the schedule is asynchronous, so that the function's third parameter is the number of steps.
    """

    generate: Callable[..., Any]
    summary: str
    sizes: Sizes
    default_chunks: int = 1
    forward_only: bool = False
    is_stream: bool = False

    @classmethod
    def of(
        cls,
        generate: Callable[..., Any],
        summary: str = "",
        sizes: Sizes | None = None,
        default_chunks: int | None = None,
        forward_only: bool = False,
        is_stream: bool = False,
    ) -> Entry:
        """Make the entry of a user's function.

        Args:
            generate: The generator function.
            summary: One line that says what the schedule is good for.
            sizes: The sizes that the function accepts. None accepts any number of chunks if the function has a third
                parameter, and only ``default_chunks`` if it has none.
            default_chunks: Number of stages on each rank if the user gives none. None takes the default value of the
                function's third parameter if that is an integer, else 1.
            forward_only: Whether the schedule is an evaluation.
            is_stream: Whether the schedule is asynchronous, so that the function's third parameter is the number of
                steps.

        Returns:
            The entry.

        Raises:
            ScheduleError: If the function can be called neither with two sizes nor with three.
        """
        third = None if is_stream else third_parameter(generate)
        if default_chunks is None:
            default_chunks = third.default if third is not None and isinstance(third.default, int) else 1
        if sizes is None:
            hint = f"leave chunks out, or give {qualified_name(generate)} a third parameter num_chunks"
            sizes = Sizes(max_chunks=None) if third is not None else Sizes(default_chunks, default_chunks, hint=hint)
        return cls(generate, summary, sizes, default_chunks, forward_only, is_stream)

    @property
    def takes_costs(self) -> bool:
        """Whether the schedule depends on how long actions last."""
        return "costs" in inspect.signature(self.generate).parameters

    @property
    def takes_replicas(self) -> bool:
        """Whether the function itself returns the rows of replicas."""
        return "replicas" in inspect.signature(self.generate).parameters

    def build(
        self,
        name: str,
        ranks: int,
        microbatches: int,
        chunks: int | None = None,
        steps: int | None = None,
        *,
        costs: Costs | None = None,
        replicas: Sequence[int] = (),
    ) -> Schedule:
        """Call the generator and check that its result has the requested sizes.

        Args:
            name: The name that the schedule gets if the function returns plain rows.
            ranks: Number of pipeline ranks.
            microbatches: Number of microbatches in a step.
            chunks: Number of stages on each rank, or None for ``default_chunks``.
            steps: Number of steps of an asynchronous schedule, None for ``STREAM``; others are one step.
            costs: Durations of actions, for a generator that takes them; None if not known.
            replicas: The number of replicas of each rank, for a generator that takes it; empty: one each.

        Returns:
            The schedule.

        Raises:
            ScheduleError: If the sizes are not accepted (all faults are listed, with the fix for each), if the function
                raises (the text names the line), or if it returns no schedule or one of other sizes.
        """
        stages_a_rank = self.default_chunks if chunks is None else chunks
        self.sizes.demand(name, ranks, microbatches, stages_a_rank)
        third = third_parameter(self.generate)
        further = (STREAM if steps is None else steps) if self.is_stream else stages_a_rank
        if self.is_stream and further < 1:
            fix = "an asynchronous schedule has at least one step, set steps to 1 or more"
            raise ScheduleError(f"schedule {name!r} cannot be made: steps={further}: {fix}")
        arguments = (ranks, microbatches) if third is None else (ranks, microbatches, further)
        call = f"{qualified_name(self.generate)}({', '.join(map(str, arguments))})"
        try:
            keywords: dict[str, Any] = {"costs": costs} if self.takes_costs else {}
            keywords |= {"replicas": replicas} if replicas and self.takes_replicas else {}
            result = self.generate(*arguments, **keywords)
            schedule = result if isinstance(result, Schedule) else Schedule.of(name, result)
        except (Exception, SystemExit) as error:
            if isinstance(error, ScheduleError) and _is_of_raypar(self.generate):
                prefix = f"schedule {name!r} cannot be made: "
                raise ScheduleError(prefix + str(error).removeprefix(prefix)) from None
            file = getattr(getattr(self.generate, "__code__", None), "co_filename", None)
            raise ScheduleError(f"schedule {name!r}: {call} {exception_phrase(error, file)}") from error
        wrong = _wrong_sizes(schedule, ranks, microbatches, stages_a_rank, further if self.is_stream else None)
        if wrong:
            fix = self._right_rows(stages_a_rank, further)
            raise ScheduleError(f"schedule {name!r}: {call} returns {', '.join(wrong)}: {fix}")
        return schedule

    def _right_rows(self, stages_a_rank: int, steps: int) -> str:
        """Return the advice for a function that has returned rows of other sizes."""
        fix = f"return one row a rank, with {stages_a_rank} stage{'s' * (stages_a_rank > 1)} a rank"
        if self.is_stream:
            return f"{fix}, and a STEP of each stage for each of {steps} steps"
        if third_parameter(self.generate) is None:
            return f"{fix}; for other numbers of stages take a third parameter, num_chunks"
        return fix


def _wrong_sizes(schedule: Schedule, ranks: int, microbatches: int, stages_a_rank: int, steps: int | None) -> list[str]:
    """Name the sizes of a schedule that differ from the requested ones; steps are None for a synchronous one."""
    sizes = {
        "ranks": (schedule.num_pipeline_ranks, ranks),
        "microbatches": (schedule.microbatches_a_step, microbatches),
        "stages": (schedule.num_stages, ranks * stages_a_rank),
    }
    sizes |= {} if steps is None else {"steps": (schedule.stream, steps)}
    return [
        f"{has} {what[:-1] if has == 1 else what}, not {wanted}"
        for what, (has, wanted) in sizes.items()
        if has != wanted
    ]


def _is_of_raypar(generate: Callable[..., Any]) -> bool:
    """Return whether a generator is one of raypar's, whose errors are about its arguments."""
    return generate.__module__.rpartition(".")[0] == __name__.rpartition(".")[0]


def third_parameter(generate: Callable[..., Any]) -> inspect.Parameter | None:
    """Find the parameter of a generator that takes the number of chunks.

    Args:
        generate: The generator function.

    Returns:
        The third positional parameter, or None if there is none.

    Raises:
        ScheduleError: If the function can be called neither with two sizes nor with three.
    """
    try:
        signature = inspect.signature(generate)
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        positional = [parameter for parameter in signature.parameters.values() if parameter.kind in kinds]
        signature.bind(*positional[:3]) if len(positional) > 2 else signature.bind(0, 0)
    except (TypeError, ValueError) as error:
        fix = (
            "write it as a function of (num_ranks, num_microbatches), and num_chunks if it takes several stages a rank"
        )
        raise ScheduleError(f"{qualified_name(generate)} can't generate schedules ({error}): {fix}") from error
    return positional[2] if len(positional) > 2 else None


def qualified_name(function: object) -> str:
    """Return a function's qualified name, or its repr if it has none."""
    return getattr(function, "__qualname__", None) or repr(function)


def exception_phrase(error: BaseException, file: str | None) -> str:
    """Describe an exception in one phrase, for an error message.

    Args:
        error: The exception.
        file: The user's source file, or None.

    Returns:
        The exception's type and text, with the last line of ``file`` that is on the traceback.
    """
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file and error.lineno:
        lines.append(error.lineno)
    where = f" ({file}, line {lines[-1]})" if lines else ""
    what = error.msg if isinstance(error, SyntaxError) else str(error)
    kind = "" if isinstance(error, ScheduleError) else f"{type(error).__name__}: "
    return f"fails{where}: {kind}{what}".rstrip(": ")
