"""An entry of the catalog: a function that generates a schedule, the sizes it takes, and what may come out of it."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raypar.schedules.schedule import Schedule, ScheduleError


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes a generator takes: any number of ranks and of microbatches, and what is said here.

    min_chunks     fewest stages a rank can hold
    max_chunks     most stages a rank can hold, None for any number
    whole_rounds   the microbatches must fill whole rounds of one microbatch a rank
    hint           what to use instead when the number of chunks does not fit
    """

    min_chunks: int = 1
    max_chunks: int | None = 1
    whole_rounds: bool = False
    hint: str = "leave chunks out, or use 'interleaved'"

    def demand(self, name: str, ranks: int, microbatches: int, chunks: int = 1) -> None:
        """Raise ScheduleError with every fault of the sizes and the fix for each."""
        faults = []
        if ranks < 1:
            faults.append(f"ranks={ranks}: a pipeline has at least one rank, set ranks to 1 or more")
        if microbatches < 1:
            faults.append(f"microbatches={microbatches}: a step has at least one, set microbatches to 1 or more")
        if chunks < self.min_chunks:
            faults.append(f"chunks={chunks}: {name} takes {self.min_chunks} or more stages a rank: {self.hint}")
        if self.max_chunks is not None and chunks > self.max_chunks:
            faults.append(f"chunks={chunks}: {name} takes at most {self.max_chunks} stage a rank: {self.hint}")
        if self.whole_rounds and ranks >= 1 and microbatches >= 1 and microbatches % ranks:
            below, above = microbatches // ranks * ranks, (microbatches // ranks + 1) * ranks
            fitting = f"{below} or {above}" if below else f"{above}"
            faults.append(
                f"microbatches={microbatches}: {name} runs whole rounds of {ranks} microbatches, one a rank: "
                f"set microbatches to {fitting}"
            )
        if faults:
            raise ScheduleError(f"schedule {name!r} cannot be made: " + "; ".join(faults))


@dataclass(frozen=True, slots=True)
class Entry:
    """One schedule of the catalog.

    generate       ``(num_ranks, num_microbatches)`` to a Schedule, mostly a compute-only one, or to plain rows of
                   Actions or of texts like "1F0"; a function with a third parameter is told ``num_chunks``, too
    summary        what it is good for, in one line
    sizes          the sizes it takes
    default_chunks stages a rank if the user says nothing
    forward_only   an evaluation: no backward
    """

    generate: Callable[..., Any]
    summary: str
    sizes: Sizes
    default_chunks: int = 1
    forward_only: bool = False

    @classmethod
    def of(
        cls,
        generate: Callable[..., Any],
        summary: str = "",
        sizes: Sizes | None = None,
        default_chunks: int | None = None,
        forward_only: bool = False,
    ) -> Entry:
        """The entry of a user's function; what is not said about chunks is read off its third parameter.

        Raises ScheduleError for what can be called neither with two sizes nor with three.
        """
        third = third_parameter(generate)
        if default_chunks is None:
            default_chunks = third.default if third is not None and isinstance(third.default, int) else 1
        if sizes is None:
            hint = f"leave chunks out, or give {name_of(generate)} a third parameter num_chunks"
            sizes = Sizes(max_chunks=None) if third is not None else Sizes(default_chunks, default_chunks, hint=hint)
        return cls(generate, summary, sizes, default_chunks, forward_only)

    def build(self, name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
        """Generate the schedule, which is called ``name`` if the function returns rows.

        Raises ScheduleError for sizes that it does not take, with all faults and the fix for each; for a function
        that raises, with its line; and for what is no schedule, or one of other sizes.
        """
        stages_a_rank = self.default_chunks if chunks is None else chunks
        self.sizes.demand(name, ranks, microbatches, stages_a_rank)
        third = third_parameter(self.generate)
        told = (ranks, microbatches) if third is None else (ranks, microbatches, stages_a_rank)
        call = f"{name_of(self.generate)}({', '.join(map(str, told))})"
        try:
            made = self.generate(*told)
            schedule = made if isinstance(made, Schedule) else Schedule.of(name, made)
        except Exception as error:
            file = getattr(getattr(self.generate, "__code__", None), "co_filename", None)
            raise ScheduleError(f"schedule {name!r}: {call} {failure(error, file)}") from error
        wanted = {"ranks": ranks, "microbatches": microbatches, "stages": ranks * stages_a_rank}
        has = (schedule.num_ranks, schedule.num_microbatches, schedule.num_stages)
        wrong = [
            f"{one} {what}, not {wanted[what]}" for what, one in zip(wanted, has, strict=True) if one != wanted[what]
        ]
        if wrong:
            fix = f"return one row a rank, with {stages_a_rank} stage{'s' * (stages_a_rank > 1)} a rank"
            if third is None:
                fix += "; for other numbers of stages take a third parameter, num_chunks"
            raise ScheduleError(f"schedule {name!r}: {call} returns {', '.join(wrong)}: {fix}")
        return schedule


def third_parameter(generate: Callable[..., Any]) -> inspect.Parameter | None:
    """The parameter of a generator that takes the number of chunks, None if it has none.

    Raises ScheduleError for what can be called neither with two sizes nor with three.
    """
    try:
        signature = inspect.signature(generate)
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        placed = [parameter for parameter in signature.parameters.values() if parameter.kind in by_place]
        signature.bind(*placed[:3]) if len(placed) > 2 else signature.bind(0, 0)
    except (TypeError, ValueError) as error:
        fix = (
            "write it as a function of (num_ranks, num_microbatches), and num_chunks if it takes several stages a rank"
        )
        raise ScheduleError(f"{name_of(generate)} can't generate schedules ({error}): {fix}") from error
    return placed[2] if len(placed) > 2 else None


def name_of(function: object) -> str:
    """What a function is called."""
    return getattr(function, "__qualname__", None) or repr(function)


def failure(error: BaseException, file: str | None) -> str:
    """An exception in one sentence, with the last line of ``file`` that it went through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file and error.lineno:
        lines.append(error.lineno)
    place = f" ({file}, line {lines[-1]})" if lines else ""
    what = error.msg if isinstance(error, SyntaxError) else str(error)
    kind = "" if isinstance(error, ScheduleError) else f"{type(error).__name__}: "
    return f"fails{place}: {kind}{what}".rstrip(": ")
