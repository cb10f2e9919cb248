"""Rows one after the other, each in a process of its own, as long as there is time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.gpu.first_hour.findings import Findings
from tests.gpu.first_hour.outcome import Outcome
from tests.gpu.first_hour.row import MACHINE
from tests.gpu.first_hour.rows import SMALL_SECONDS, Row

NO_TIME = "no time left"
_RESERVE = 3.0  # seconds of the last ones in which no row runs: to write, and to end
_SLACK = 2.0, 30.0  # a row may take twice its guess and half a minute more ...
_SMALL_SLACK = 2.0, 150.0  # ... in small sizes the machine may be busy
_HALVINGS = 2  # of a microbatch that does not fit
_LOG_LINES = 40
_LOOK = 0.02  # seconds from one look at a process to the next
_STARTS = 60.0  # seconds in which the machine is asked

Command = Callable[[str, Path, Sequence[str]], list[str]]  # a row's name, its file and options -> its process


def command_of(name: str, result: Path, options: Sequence[str]) -> list[str]:
    """Return the command of a row's process."""
    return [sys.executable, "-u", "-m", "tests.gpu.first_hour.row", name, str(result), *options]


class Runner:
    """Runs rows until its time is over.

    Args:
        folder: For files that are not kept: results, logs and the converted text.
        seconds: The time.
        small: Whether rows are measured in small sizes.
        command: Gives the command of a row.

    Attributes:
        card: What torch calls the GPU, as ``machine`` found it.
    """

    def __init__(self, folder: Path, seconds: float, *, small: bool = False, command: Command = command_of) -> None:
        self._folder, self._end, self.small, self._command = folder, time.monotonic() + seconds, small, command
        self.card = ""
        self._count = 0

    @property
    def left(self) -> float:
        """Seconds in which rows may still run."""
        return self._end - _RESERVE - time.monotonic()

    def machine(self) -> dict[str, Any]:
        """Return what is known of the machine. Raises RuntimeError with the reason why nothing is."""
        found = self._run(MACHINE, _STARTS, [])
        if found.status != "done":
            raise RuntimeError(f"{found.reason}\n" + "\n".join(found.log))
        self.card = str(found.figures["card"])
        return found.figures

    def run(self, rows: Sequence[Row], found: Findings, after: Callable[[Row, Outcome], None]) -> None:
        """Run the rows that are still open, and call ``after`` for each, also for those that are left out."""
        for row in rows:
            if found.is_open(row.name):
                found.outcomes[row.name] = outcome = self._measured(row, found.outcomes.get(row.name))
                after(row, outcome)

    def _measured(self, row: Row, before: Outcome | None) -> Outcome:
        """Run a row, with smaller microbatches if memory runs out. Its attempts and seconds add up."""
        expected = SMALL_SECONDS if self.small else row.seconds
        if expected > self.left:
            return before if before is not None else Outcome(NO_TIME, NO_TIME)
        spent = 0.0 if before is None else before.seconds
        halvings = 0
        while True:
            options = ["--halvings", str(halvings), "--seconds", str(expected), "--card", self.card]
            options += ["--cache", str(self._folder / "text")]
            factor, more = _SMALL_SLACK if self.small else _SLACK
            allowed = factor * expected + more
            outcome = self._run(row.name, allowed, [*options, *(["--small"] if self.small else [])])
            spent += outcome.seconds
            if (
                not _ran_out_of_memory(outcome)
                or row.kind != "training"
                or halvings == _HALVINGS
                or expected > self.left
            ):
                break
            halvings += 1
        if halvings and outcome.status == "done":
            outcome.notes.append(f"microbatches {2**halvings} times as large need more memory than there is")
        outcome.seconds, outcome.attempts = spent, 1 if before is None else before.attempts + 1
        return outcome

    def _run(self, name: str, allowed: float, options: Sequence[str]) -> Outcome:
        """Run a process for as many seconds as it is allowed, or as are left, and return what it reported."""
        deadline = max(1.0, min(allowed, self.left))
        self._count += 1
        result, log = self._folder / f"{self._count}.json", self._folder / f"{self._count}.log"
        begin = time.monotonic()
        with log.open("w") as out:
            process = subprocess.Popen(
                self._command(name, result, options),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # so that it can be ended with all that it started
            )
        try:
            is_late = not _ends(process.pid, deadline)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        report = _read(result)
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        outcome = Outcome(
            report.get("status", "failed"),
            report.get("reason", ""),
            report.get("figures", {}),
            report.get("notes", []),
            time.monotonic() - begin,
        )
        if is_late:
            doing = report.get("doing", "starting")
            cause = "not done within" if deadline == allowed else "the time was over after"
            outcome.status, outcome.reason = "cut off", f"{cause} {deadline:.0f} s, while {doing}"
        elif (code != 0 and outcome.status != "failed") or "status" not in report:
            outcome.status, outcome.reason = "failed", f"{_end_of(code)}: {lines[-1] if lines else 'it wrote nothing'}"
        if outcome.status in ("failed", "cut off"):
            outcome.log = lines[-_LOG_LINES:]
        return outcome


def _ends(process: int, seconds: float) -> bool:
    """Wait until a child has ended; return whether it has in time. It keeps its id, which is also that of its group."""
    end = time.monotonic() + seconds
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK)
    return True


def _ran_out_of_memory(outcome: Outcome) -> bool:
    lines = [outcome.reason, *outcome.log]
    return outcome.status == "failed" and any("out of memory" in line.lower() for line in lines)


def _read(result: Path) -> dict[str, Any]:
    """Return a row's report; an empty one if it has written none."""
    try:
        found: dict[str, Any] = json.loads(result.read_text())
    except (OSError, ValueError):
        return {}
    return found


def _end_of(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"ended by {signal.Signals(-code).name}"
