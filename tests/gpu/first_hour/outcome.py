"""What became of a row, as it is kept in the JSON, and how the process that measures a row reports it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from raypar.actors.machine.files import WholeFile

# cut off: at its deadline; what it had reported by then is there
Status = Literal["done", "failed", "cut off", "not possible", "no time left"]
Report = Callable[..., None]  # figures by name; ``doing`` says what comes next


class NotPossibleError(Exception):
    """This machine lacks what a row needs."""


@dataclass
class Outcome:
    """What became of a row.

    reason    why it is not done; "" if it is
    figures   what was measured, also of a row that was cut off later
    notes     what a reader must know of the figures
    seconds   that it took, in all its attempts
    attempts  how often it was started
    log       the end of what a failed row wrote
    """

    status: Status
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    attempts: int = 0
    log: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class ResultFile:
    """The file in which the process of a row keeps its report, whole at any time.

    ``status``, ``reason``, ``figures``, ``notes`` and ``doing`` of the report are its keys.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._report: dict[str, Any] = {"figures": {}, "notes": [], "doing": "starting"}

    def report(self, *, doing: str | None = None, note: str | None = None, **figures: Any) -> None:
        """Add figures, a note, or what the row does from now on."""
        self._report["figures"] |= figures
        if doing is not None:
            self._report["doing"] = doing
        if note is not None and note not in self._report["notes"]:
            self._report["notes"].append(note)
        write_json(self._path, self._report)

    def end(self, status: Status, reason: str = "") -> None:
        """Say what became of the row."""
        self._report |= {"status": status, "reason": reason}
        write_json(self._path, self._report)


def write_text(path: Path, text: str) -> None:
    """Write a file aside and rename it, so that it is whole whenever it is read."""
    with WholeFile(path) as out:
        out.write(text.encode())
        out.commit()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON as ``write_text`` does."""
    write_text(path, json.dumps(content, indent=1) + "\n")
