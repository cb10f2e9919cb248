"""What happened to a run besides training: it stopped, failed, or went on from a checkpoint. Read from its log."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from raypar.reporting.html.charts import Mark
from raypar.reporting.run_folder.read import Past

_LINE = re.compile(r"\S+ ([A-Z]+) (.*)")
_STARTING = re.compile(r"starting \d+ actors?|actors: \d+.*")  # the first is of an older raypar, ahead of the other
_SURVIVED = re.compile(r"the run goes on (?:after step (\d{1,15})|from the start)\b.*")
_GROWN = re.compile(r"the run (?:is whole again|has grown|has moved|has another layout) after step (\d{1,15})\b.*")
_STEP = re.compile(r"step +(\d[\d,]{0,14})/(\d[\d,]{0,14}) ")


@dataclass
class _Session:
    """What one job wrote to the log.

    Attributes:
        first: The first step that it logged, counted from 1; None if there is none.
        last: The last one.
        total: The number of steps after which it was to end.
        halted: What ended it, Ctrl-C or SIGTERM; "" if neither did.
        errors: Its errors.
        survived: The failures that it survived, and when it got replicas back: the steps taken before the point that it
            went on from, and why.
    """

    first: int | None = None
    last: int = 0
    total: int = 0
    halted: str = ""
    errors: list[str] = field(default_factory=list)
    survived: list[tuple[int, str]] = field(default_factory=list)


def happenings(past: Past) -> list[Mark]:
    """Find where a run stopped, failed, or went on.

    The log has only some of the steps of a long run. Where one went on is then known from its checkpoints, and where
    one stopped from failures.jsonl, or to the last step that was logged.

    Args:
        past: The content of the run folder.

    Returns:
        The marks, as it happened.
    """
    return [*_of_log(past), *_of_metrics(past)]


def ending(past: Past) -> str:
    """Say how a run that is over ended before its last step, as "failed after step 8: ..."; "" if it took all."""
    sessions = _sessions(past.log)
    return next((mark.text for mark in _end(past, sessions[-1])), "")


def _of_log(past: Past) -> Iterator[Mark]:
    found = [session for session in _sessions(past.log) if session.first is not None or session.errors]
    for session, then in pairwise([*found, None]):
        assert session is not None
        yield from (Mark(step, "resume", text) for step, text in session.survived)
        resumed = _resumed_after(past, then) if then is not None and then.first is not None else 0
        if then is None:
            yield from _end(past, session)
        elif session.last < session.total or session.errors:
            exact = _failed_after(past, session)
            taken = max(session.last, resumed) if exact is None else exact
            where = f"after step {taken:,}" + (" or a little later" if exact is None else "")
            yield Mark(taken, "failure", _reason(session, where))
        if resumed:
            yield Mark(resumed, "resume", f"went on after step {resumed:,}")


def _end(past: Past, session: _Session) -> Iterator[Mark]:
    """Yield the mark of the last job's end, if it is over and has not taken all its steps."""
    taken = max((line["step"] + 1 for line in past.metrics if "val_loss" not in line), default=0)
    if not past.under_way and (taken < past.config.get("steps", 0) or session.errors):
        yield Mark(taken, "failure", _reason(session, f"after step {taken:,}"))


def _of_metrics(past: Past) -> Iterator[Mark]:
    steps = [line for line in past.metrics if "val_loss" not in line]
    for line, then in pairwise(steps):
        if then["step"] <= line["step"]:
            yield Mark(then["step"], "resume", f"went on after step {then['step']:,}")
    lost = next((line for line in steps if line["loss"] is not None and not math.isfinite(line["loss"])), None)
    if lost is not None:
        yield Mark(lost["step"] + 1, "failure", f"the loss of step {lost['step'] + 1:,} is not finite")


def _sessions(log: list[str]) -> list[_Session]:
    found, before = [_Session()], ""
    for line in log:
        if (parts := _LINE.fullmatch(line)) is None:
            continue
        level, text = parts.groups()
        session = found[-1]
        if _STARTING.fullmatch(text):
            found.append(_Session())
        elif step := _STEP.match(text):
            session.last, session.total = (int(number.replace(",", "")) for number in step.groups())
            session.first = session.last if session.first is None else session.first
        elif survived := _SURVIVED.fullmatch(text):
            session.survived.append((int(survived[1] or 0), f"{before}: {text}"))
        elif grown := _GROWN.fullmatch(text):
            session.survived.append((int(grown[1]), text))
        elif level in ("ERROR", "CRITICAL"):
            session.errors.append(text)
        elif text.startswith(("Ctrl-C", "SIGTERM", "interrupted")):
            session.halted = session.halted or ("SIGTERM" if text.startswith("SIGTERM") else "Ctrl-C")
        before = text
    return found


def _reason(session: _Session, where: str) -> str:
    if session.errors:
        return f"failed {where}: {session.errors[-1]}"
    return f"stopped with {session.halted} {where}" if session.halted else f"ended {where}, before its last step"


def _failed_after(past: Past, session: _Session) -> int | None:
    """Return the steps taken before the failure that ended a job, if failures.jsonl has it; else None."""
    error = session.errors[-1] if session.errors else ""
    ends = [one for one in past.failures if one["is_end"] and error.startswith(one["reason"])]
    return next((one["step"] - 1 for one in ends if one["step"] > session.last), None)


def _resumed_after(past: Past, session: _Session) -> int:
    """Return the steps taken before a job: those of the newest checkpoint that its first logged step can follow."""
    assert session.first is not None
    every = max(1, session.total // 50)
    saved = [one.step for one in past.checkpoints if session.first - every <= one.step < session.first]
    return max(saved, default=session.first - 1)
