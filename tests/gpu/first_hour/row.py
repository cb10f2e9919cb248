"""The process of a row.

    python -m tests.gpu.first_hour.row NAME RESULT [--small] [--halvings N] [--seconds S] [--cache FOLDER] [--card CARD]

It measures the row of that name, and keeps its report in the file RESULT as it goes. The name "machine" gives what is
known of the machine.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.gpu.first_hour.card import machine_facts, memory_in_use
from tests.gpu.first_hour.outcome import NotPossibleError, ResultFile
from tests.gpu.first_hour.rows import ROWS, Row

MACHINE = "machine"
_IN_USE = 0.1  # of a GPU's memory, at the most, before a row begins ...
_FREED = 10.0  # ... or after so many seconds


def measure(name: str, result: ResultFile, chosen: argparse.Namespace) -> None:
    """Measure a row. Only what its kind needs is imported."""
    if name == MACHINE:
        result.report(**machine_facts())
        return
    row: Row = ROWS[name]
    options: dict[str, Any] = {"small": chosen.small, "report": result.report, **row.arguments}
    if row.kind == "tests":
        from tests.gpu.first_hour.gpu_tests import run_tests

        run_tests(row.arguments["path"], result.report)
        return
    _await_memory(result)
    if row.kind == "training":
        from tests.gpu.first_hour.training import measure_training

        names = ("halvings", "seconds", "cache", "card")
        measure_training(**options, **{name: getattr(chosen, name) for name in names})
    elif row.kind == "groups":
        from tests.gpu.first_hour.nccl_groups import measure_group

        measure_group(**options)
    elif row.kind == "replicas":
        from tests.gpu.first_hour.replicas import measure_replicas

        measure_replicas(**options, cache=chosen.cache)
    else:
        from tests.gpu.first_hour.nccl_pipeline import measure_pipeline

        measure_pipeline(**options, cache=chosen.cache)


def _await_memory(result: ResultFile) -> None:
    """Wait until the GPU's memory is free: what the row before held takes some time to be freed."""
    end = time.monotonic() + _FREED
    while (found := memory_in_use()) is not None and found[0] > _IN_USE * found[1]:
        if time.monotonic() > end:
            result.report(note=f"{found[0]:.1f} GiB of the GPU were in use before it began")
            return
        time.sleep(0.5)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m tests.gpu.first_hour.row")
    parser.add_argument("name")
    parser.add_argument("result", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--halvings", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--cache", default="", help="folder for the converted text")
    parser.add_argument("--card", default="", help="what torch calls the GPU")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Measure the row; 1 if it failed."""
    chosen = parse(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    result = ResultFile(chosen.result)
    try:
        measure(chosen.name, result, chosen)
    except NotPossibleError as error:
        result.end("not possible", str(error))
        return 0
    except BaseException as error:
        traceback.print_exc()
        result.end("failed", last_line(error))
        return 1
    result.end("done")
    return 0


def last_line(error: BaseException) -> str:
    """Return the last line of an error, with its type."""
    lines = [line for line in "".join(traceback.format_exception_only(error)).splitlines() if line.strip()]
    return lines[-1].strip() if len(lines) < 2 else f"{type(error).__name__}: {lines[-1].strip()}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
