"""A line of failures.jsonl: a failure that a run has survived, or that has ended it; and what failures cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import FailFast

from raypar.reporting.run_folder.metrics_line import Figure, Number
from raypar.schedules.float_sum import float_sum

Texts = Annotated[tuple[str, ...], FailFast()]


@dataclass(frozen=True)
class DeathLine:
    """The schema of what is known of an actor's death; see ``raypar.errors.Death``."""

    cause: str
    exit_code: int | None
    signal: str
    out_of_memory: bool
    last_action: str
    log: Texts
    log_file: str


@dataclass(frozen=True)
class FailureLine:
    """The schema of a failure; see ``raypar.job.recover.failures.Failure``."""

    at: str
    step: Number
    reason: str
    replaced: Texts
    back_to: Number
    source: str
    seconds: Figure
    lost: Figure
    death: DeathLine | None
    is_end: bool
    size: str = ""


def effective_share(kept: float, lost: Sequence[float]) -> float:
    """Return the share of effective training time (ETTR).

    Args:
        kept: Seconds of the steps that were kept.
        lost: Seconds that each failure has cost.
    """
    whole = kept + float_sum(lost)
    return kept / whole if whole else 1.0
