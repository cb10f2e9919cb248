"""All rows and the machine: kept as JSON and as Markdown, whole after every row, and read again to go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.tables import Table
from tests.gpu.first_hour.outcome import Outcome, write_json, write_text
from tests.gpu.first_hour.rows import ROWS, Kind

JSON, MARKDOWN = "first_hour.json", "first_hour.md"
_UNKNOWN = "-"
_WHY = "why, and notes"
_ATTEMPTS = 2  # a row that failed is tried once more
_SAME = ("card", "driver", "torch", "nccl")  # of two machines whose rows may share a table
_MIB = 2**20
_Columns = tuple[tuple[str, str, Callable[[Any], str]], ...]  # heading, figure, how it is written


@dataclass
class Findings:
    """What was measured, and on what.

    small     sizes that only show that everything runs
    outcomes  by the row's name
    """

    machine: dict[str, Any]
    small: bool
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def is_open(self, name: str) -> bool:
        """Whether a row is still to be measured: it was not started, or its first attempt failed."""
        found = self.outcomes.get(name)
        if found is None or found.status == "no time left":
            return True
        return found.status in ("failed", "cut off") and found.attempts < _ATTEMPTS

    def write(self, folder: Path) -> None:
        """Keep all of it, as JSON and as Markdown."""
        rows = {name: outcome.to_dict() for name, outcome in self.outcomes.items()}
        write_json(folder / JSON, {"machine": self.machine, "small": self.small, "rows": rows})
        write_text(folder / MARKDOWN, self.text(markdown=True))

    def text(self, *, markdown: bool = False) -> str:
        """The machine and a table for each kind of row."""
        tables = [table for kind, draw in _TABLES.items() if (table := draw(self._of(kind))).rows]
        drawn = [table.markdown() if markdown else table.text() for table in tables]
        size = " Small sizes, which show that everything runs: their figures mean nothing." if self.small else ""
        return "\n\n".join([*drawn, f"{machine_line(self.machine)}{size}"]) + "\n"

    def failures(self) -> dict[str, str]:
        """Why rows failed or were cut off, by name."""
        return {name: one.reason for name, one in self.outcomes.items() if one.status in ("failed", "cut off")}

    def _of(self, kind: Kind) -> dict[str, Outcome]:
        return {name: one for name, one in self.outcomes.items() if name in ROWS and ROWS[name].kind == kind}


def resumed(path: Path, machine: Mapping[str, Any], *, small: bool) -> Findings:
    """Read what an earlier call has kept.

    Raises ValueError if it was measured on another machine or in other sizes, or if the file can't be read.
    """
    try:
        kept = json.loads(path.read_text())
        outcomes = {name: Outcome(**row) for name, row in kept["rows"].items()}
        before, was_small = kept["machine"], kept["small"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--resume {path}: no file of this program ({error}): leave it out") from error
    if was_small != small:
        raise ValueError(f"--resume {path}: its sizes are {'small' if was_small else 'full'} ones: leave it out")
    other = [f"{name} {before.get(name)}, here {machine.get(name)}" for name in _SAME]
    other = [text for name, text in zip(_SAME, other, strict=True) if before.get(name) != machine.get(name)]
    if other:
        raise ValueError(f"--resume {path}: it was measured on another machine ({'; '.join(other)}): leave it out")
    return Findings(dict(machine), small, outcomes)


def machine_line(machine: Mapping[str, Any]) -> str:
    """Return the card, the driver, the versions and the date."""
    names = ("card", "driver", "cuda", "nccl", "torch", "ray", "python", "processor", "date")
    labels = {"card": "GPU", "cuda": "CUDA", "nccl": "NCCL", "python": "Python"}
    return ", ".join(f"{labels.get(name, name)} {machine.get(name, 'unknown')}" for name in names) + "."


def _training_table(outcomes: Mapping[str, Outcome]) -> Table:
    columns: _Columns = (
        ("tokens/s", "tokens_per_s", "{:,.0f}".format),
        ("MFU", "mfu", "{:.1%}".format),
        ("peak GiB", "peak_memory_gib", "{:.2f}".format),
        ("step ms", "step_ms", "{:,.1f}".format),
        ("kernels", "kernels", "{:,}".format),
        ("gaps ms", "gap_ms", "{:,.1f}".format),
        ("gaps of the step", "gap_share", "{:.1%}".format),
        ("first step s", "first_step_s", "{:.1f}".format),
        ("microbatch", "micro_batch_size", str),
        ("tokens a step", "tokens_a_step", "{:,}".format),
    )
    title = (
        "Training on one GPU. Medians of up to 3 rounds of 2 steps. MFU is the share of the card's peak FLOP/s; "
        "kernels are those of the middle one of three steps, gaps the time between its first and its last kernel in "
        "which none runs. fp32 products are fp32, not TF32"
    )
    return _table(title, columns, outcomes)


def _tests_table(outcomes: Mapping[str, Outcome]) -> Table:
    columns = tuple((name, name, str) for name in ("tests", "passed", "failed", "skipped"))
    return _table("Tests that need a GPU", columns, outcomes)


def _groups_table(outcomes: Mapping[str, Outcome]) -> Table:
    columns: _Columns = (
        ("class of the group", "group", str),
        ("operations that are right", "ops", len_of),
        ("MB/s with 64 KiB, 1 MiB and 16 MiB", "bytes_per_s", bandwidths),
    )
    return _table("Groups on one GPU", columns, outcomes, words=[name for name, _, _ in columns])


def _pipeline_table(outcomes: Mapping[str, Outcome]) -> Table:
    columns: _Columns = (
        ("classes of the groups", "group", ", ".join),
        ("computes as one process does", "right", lambda right: "yes" if right else "no"),
        ("tokens/s", "tokens_per_s", "{:,.0f}".format),
    )
    return _table("A pipeline on one GPU", columns, outcomes, words=[name for name, _, _ in columns[:2]])


def _replicas_table(outcomes: Mapping[str, Outcome]) -> Table:
    columns: _Columns = (
        ("tokens/s", "tokens_per_s", "{:,.0f}".format),
        ("peak GiB of a replica", "peak_memory_gib", "{:.2f}".format),
    )
    return _table("Several replicas on one GPU, all with the same variables of NCCL", columns, outcomes)


_TABLES: dict[Kind, Callable[[Mapping[str, Outcome]], Table]] = {
    "training": _training_table,
    "tests": _tests_table,
    "groups": _groups_table,
    "pipeline": _pipeline_table,
    "replicas": _replicas_table,
}


def _table(title: str, columns: _Columns, outcomes: Mapping[str, Outcome], *, words: Sequence[str] = ()) -> Table:
    """A row for each outcome: its name, its figures, and why there are no more, or what to know of them.

    ``words`` are the headings of columns that are no figures.
    """
    header = ["row", *(name for name, _, _ in columns), _WHY]
    return Table(title, header, _cells(outcomes, columns), words=[*words, _WHY])


def _cells(outcomes: Mapping[str, Outcome], columns: _Columns) -> list[list[str]]:
    return [
        [
            name,
            *(form(one.figures[key]) if key in one.figures else _UNKNOWN for _, key, form in columns),
            "; ".join(filter(None, [_state(one), *one.notes])).replace("|", "/").replace("\n", " ") or _UNKNOWN,
        ]
        for name, one in outcomes.items()
    ]


def _state(one: Outcome) -> str:
    if one.status == "done":
        return ""
    return one.status if one.status == one.reason or not one.reason else f"{one.status}: {one.reason}"


def len_of(ops: list[str]) -> str:
    """Return how many operations there are, and which."""
    return f"{len(ops)}: {', '.join(ops)}"


def bandwidths(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return MB/s of each operation, by the size of the tensor in ascending order."""
    parts = []
    for op, by_size in found.items():
        speeds = [by_size[size] for size in sorted(by_size, key=int)]
        parts.append(f"{op} {' '.join(f'{speed / 1e6:,.0f}' for speed in speeds)}")
    return "; ".join(parts)
