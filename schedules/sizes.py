"""Which sizes a generator takes, said once and checked with all faults at a time."""

from __future__ import annotations

from dataclasses import dataclass

from raypar.schedules.schedule import ScheduleError


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
