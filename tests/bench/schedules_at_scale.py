"""How long schedules take at scale, and how much memory: ours at growing sizes, torch's beside them.

    python -m tests.bench.schedules_at_scale          # sizes that take seconds
    python -m tests.bench.schedules_at_scale --full   # up to 1,024 ranks x 4,096 microbatches, some minutes

Every line is a process of its own, so that its peak of resident memory is its own. Times are CPU time, in which other
programs do not count.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from raypar.schedules import build, check, lower
from tests.bench.arguments import parse_words, parser_of, printed

T = TypeVar("T")

# Ranks, microbatches.
SMALLEST = [(2, 4)]
BOTH = [(8, 32), (16, 64), (32, 128), (64, 256)]
LARGE = [(128, 512), (256, 1024), (512, 2048), (1024, 4096)]
HEADER = "whose  schedule     ranks    mb    actions  generate    lower    check     MiB"


def timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def ours(name: str, ranks: int, microbatches: int) -> tuple[int, list[float]]:
    """Number of actions of the lowered schedule, and seconds to generate, lower and check it."""
    generating, schedule = timed(lambda: build(name, ranks, microbatches))
    lowering, lowered = timed(lambda: lower(schedule))
    checking, _ = timed(lambda: check(lowered, send_capacity=8))
    return lowered.num_actions, [generating, lowering, checking]


def torchs(name: str, ranks: int, microbatches: int) -> tuple[int, list[float]]:
    """The same of torch's classes: their rows, ``_add_send_recv``, and ``_validate_schedule`` with the simulation."""
    from torch.distributed.pipelining import schedules as torch_schedules

    chunks = 2 if name == "interleaved" else 1
    generating, rows = timed(lambda: torch_rows(name, ranks, microbatches, chunks))

    def home(stage: int) -> int:
        return stage % ranks

    copied = {rank: list(row) for rank, row in rows.items()}
    lowering, lowered = timed(lambda: torch_schedules._add_send_recv(copied, home, ranks * chunks))

    def checked() -> None:
        torch_schedules._validate_schedule(rows, ranks, ranks * chunks, microbatches)
        torch_schedules._simulate_comms_compute(lowered, home, ranks * chunks)

    checking, _ = timed(checked)
    return sum(map(len, lowered.values())), [generating, lowering, checking]


def torch_rows(name: str, ranks: int, microbatches: int, chunks: int) -> dict:
    """The compute rows by torch's own methods, which need no process group. Its 1F1B names a microbatch that does
    not exist on the last rank, which nothing after it would take; that rank's row is written here.
    """
    from torch.distributed.pipelining import schedules as torch_schedules

    if name == "interleaved":
        schedule = object.__new__(torch_schedules.ScheduleInterleaved1F1B)
        schedule.pp_group_size, schedule._n_microbatches, schedule.n_local_stages = ranks, microbatches, chunks
        schedule.microbatches_per_round = microbatches // max(1, microbatches // ranks)
        rows = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}
    else:
        single = object.__new__(torch_schedules.Schedule1F1B)
        single._num_stages, single._n_microbatches = ranks, microbatches
        rows = single._get_pipeline_order()
        action, last = torch_schedules._Action, ranks - 1
        forward, backward = torch_schedules.FORWARD, torch_schedules.FULL_BACKWARD
        rows[last] = [action(last, op, mb) for mb in range(microbatches) for op in (forward, backward)]
    compute = {torch_schedules.FORWARD, torch_schedules.FULL_BACKWARD}
    return {rank: [a for a in row if a is not None and a.computation_type in compute] for rank, row in rows.items()}


def jobs(sizes: Sequence[tuple[int, int]], *, full: bool) -> Iterator[tuple[str, str, int, int]]:
    for name in ("1f1b", "interleaved"):
        yield from ((whose, name, *size) for whose in ("torch", "raypar") for size in sizes)
    if full:
        yield from (("raypar", "1f1b", ranks, microbatches) for ranks, microbatches in LARGE)


def measure(whose: str, name: str, ranks: int, microbatches: int) -> str:
    actions, seconds = {"raypar": ours, "torch": torchs}[whose](name, ranks, microbatches)
    generate, lowering, checking = seconds
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        f"{whose:6} {name:12} {ranks:5} {microbatches:5} {actions:10} "
        f"{generate:8.2f}s {lowering:7.2f}s {checking:7.2f}s {peak:7.0f}"
    )


def main(words: Sequence[str] | None = None) -> None:
    """Print the table, or a line of it."""
    parser = parser_of(__doc__)
    parser.add_argument("--full", action="store_true", help="up to 1,024 ranks x 4,096 microbatches")
    parser.add_argument("--one", nargs=4, metavar=("WHOSE", "NAME", "RANKS", "MICROBATCHES"), help="a single line")
    asked = parse_words(parser, words, "")
    if asked.one:
        whose, name, ranks, microbatches = asked.one
        print(measure(whose, name, int(ranks), int(microbatches)))
        return
    print(HEADER)
    for job in jobs(SMALLEST if asked.smallest else BOTH, full=asked.full):
        print(printed("tests.bench.schedules_at_scale", ("--one", *job), here=asked.smallest), end="", flush=True)


if __name__ == "__main__":
    main()
