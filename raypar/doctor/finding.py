"""What the doctor found: one fact, how bad it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "note", "slow", "wrong", "danger"]
SICK: tuple[Level, ...] = ("wrong", "danger")


@dataclass(frozen=True)
class Finding:
    """One fact.

    Attributes:
        level: "ok"; "note", which may matter; "slow"; "wrong", with which a run fails; "danger", by which others may
            run code or read secrets.
        subject: What it is about: versions, network, gpus, memory, ray, token, dashboard, leftovers or times.
        text: The fact.
        advice: What to do; "" if nothing is.
    """

    level: Level
    subject: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.level:<6} {self.subject:<9} {self.text}{f': {self.advice}' if self.advice else ''}"


def is_sound(findings: Iterable[Finding]) -> bool:
    """Return whether nothing is wrong or dangerous."""
    return not any(finding.level in SICK for finding in findings)


def as_dicts(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """Return findings as plain dictionaries, for JSON."""
    return [asdict(finding) for finding in findings]
