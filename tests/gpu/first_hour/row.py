"""The process of a row.

    python -m tests.gpu.first_hour.row NAME RESULT [--small] [--halvings N] [--seconds S] [--cache FOLDER]

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

from tests.gpu.first_hour.outcome import NotPossibleError, ResultFile
from tests.gpu.first_hour.rows import ROWS, Row

MACHINE = "machine"
_FREE = 0.9  # of a GPU's memory, before a row begins ...
_FREED = 20.0  # ... or after so many seconds: what the last row held takes some time to be freed


def measure(name: str, result: ResultFile, chosen: argparse.Namespace) -> None:
    """Measure a row. Only what its kind needs is imported."""
    if name == MACHINE:
        from tests.gpu.first_hour.card import machine_facts

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

        limits = {"halvings": chosen.halvings, "seconds": chosen.seconds, "cache": chosen.cache}
        measure_training(**options, **limits)
    elif row.kind == "groups":
        from tests.gpu.first_hour.nccl_groups import measure_group

        measure_group(**options)
    else:
        from tests.gpu.first_hour.nccl_pipeline import measure_pipeline

        measure_pipeline(**options, cache=chosen.cache)


def _await_memory(result: ResultFile) -> None:
    """Wait until the GPU's memory is free, where there is a GPU."""
    import torch

    end = time.monotonic() + _FREED
    while torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        if free >= _FREE * total:
            return
        if time.monotonic() > end:
            result.report(note=f"{(total - free) / 2**30:.1f} GiB of the GPU were in use before it began")
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
    parser.add_argument("--cache", default="")
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
