"""All that the first hour with a GPU can measure: raypar's speed beside its peers', the tests, NCCL on one GPU.

    python -m tests.gpu.first_hour --minutes 9 [--resume build/first_hour/first_hour.json]

Rows are ordered by what they are worth. One that does not fit into the time that is left is left out, with that as its
reason; call it again with --resume to go on. Without a GPU it runs in small sizes and says what it could not do.
"""

from __future__ import annotations

import argparse
import fnmatch
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.first_hour.findings import JSON, MARKDOWN, Findings, machine_line, resumed
from tests.gpu.first_hour.outcome import Outcome
from tests.gpu.first_hour.rows import ROWS, Row
from tests.gpu.first_hour.runner import Runner


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; ``only`` becomes the rows that it names."""
    parser = argparse.ArgumentParser(
        "python -m tests.gpu.first_hour", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all of it, default: 9")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=Path("build/first_hour"), help="for both files")
    parser.add_argument("--resume", type=Path, metavar="JSON", help="go on after a call that has written this file")
    parser.add_argument("--only", metavar="PATTERN,...", default="*", help="rows by name, such as 'gpt-124m/bf16/*'")
    parser.add_argument("--small", action="store_true", help="small sizes, as without a GPU: does everything run?")
    parser.add_argument("--list", action="store_true", help="list the rows, with a guess of what each takes on an H100")
    chosen = parser.parse_args(arguments)
    patterns = chosen.only.split(",")
    chosen.only = [row for name, row in ROWS.items() if any(fnmatch.fnmatchcase(name, one) for one in patterns)]
    if not chosen.only:
        parser.error(f"--only {','.join(patterns)}: no row has such a name: --list names them")
    if not chosen.minutes > 0:
        parser.error("--minutes must be more than 0")
    return chosen


def main(arguments: Sequence[str]) -> int:
    """Measure, and print what was found; 1 if a row failed."""
    chosen = parse(arguments)
    if chosen.list:
        print("\n".join(f"{row.seconds:4.0f} s  {row.name}" for row in chosen.only))
        return 0
    chosen.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="first-hour-") as folder:
        return _measure(chosen, Path(folder))


def _measure(chosen: argparse.Namespace, folder: Path) -> int:
    seconds = 60.0 * chosen.minutes
    runner = Runner(folder, seconds)
    machine = runner.machine()
    small = chosen.small or not machine["gpus"]
    try:
        found = Findings(machine, small) if chosen.resume is None else resumed(chosen.resume, machine, small=small)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(machine_line(machine), flush=True)
    found.write(chosen.out)

    def after(row: Row, outcome: Outcome) -> None:
        found.write(chosen.out)
        speed = outcome.figures.get("tokens_per_s")
        told = "" if speed is None else f", {speed:,.0f} tokens/s"
        why = "" if outcome.reason in ("", outcome.status) else f": {outcome.reason}"
        took = f" ({outcome.seconds:.1f} s)" if outcome.attempts else ""
        print(f"{row.name}: {outcome.status}{told}{took}{why}", flush=True)

    runner.small = small
    runner.run(chosen.only, found, after)
    print(f"\n{found.text()}\nKept in {chosen.out / JSON} and {chosen.out / MARKDOWN}.")
    if left := sum(found.is_open(row.name) for row in chosen.only):
        print(f"Rows that are still to be measured: {left}. Give the command --resume {chosen.out / JSON} for these.")
    failures = found.failures()
    for name, reason in failures.items():
        print(f"{name} failed: {reason}")
    return int(bool(failures))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the row under way, too
    sys.exit(main(sys.argv[1:]))
