"""``raypar calibrate``: measure this machine or cluster, for predictions in seconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raypar.cli.words.arguments import parse_command
from raypar.errors import ConfigError
from raypar.planner.calibrated.calibration import Calibration, Kind
from raypar.planner.calibrated.calibration_file import VARIABLE, default_path, unwritable_faults, write_calibration
from raypar.schedules.formatting import size

_MOST = 3600.0
_OF_KIND: Mapping[Kind, str] = {
    "tensor": "tensor parallelism adds to a block",
    "sequence": "sequence parallelism adds to a block",
    "context": "context parallelism adds to a block",
    "experts": "experts add to a block",
    "expert parallel": "dividing experts adds to a block",
    "lent": "adding its gradients to buckets adds to a block",
    "gathered": "gathering its weights adds to a block",
    "pipeline": "waiting for others adds to a block of a pipeline",
    "head": "the head and the loss take",
}
_ONE_FIGURE: Mapping[Kind, str] = {
    "reduced": "summing its gradients over replicas adds to a block",
    "shared": "sharing out an update adds to a block",
    "split": "splitting a backward adds to a block",
}


@dataclass(frozen=True)
class CalibrateArgs:
    """The flags of ``raypar calibrate``."""

    out: Path | None = None
    """the file to write; None: where predictions look, which is what RAYPAR_CALIBRATION names, else
    ~/.raypar/calibration.json"""
    seconds: float = 60.0
    """how long it may take, about; where time is short, the least important is left out"""

    def faults(self) -> Iterator[str]:
        """Yield which values are out of range."""
        if not 10 <= self.seconds <= _MOST:
            yield f"--seconds is {self.seconds:g}: give 10 to {_MOST:g}"


def run_calibrate(words: Sequence[str], say: Callable[[str], object]) -> str:
    """Run ``raypar calibrate``.

    Args:
        words: The words after ``calibrate``.
        say: Prints a line.

    Returns:
        What was measured, and where it is.

    Raises:
        ConfigError: The words have mistakes, Ray can't be reached, or the file can't be written.
        JobError: An actor failed.
    """
    what = "Measure products, attention, memory, groups and short runs on this machine, or the cluster at RAY_ADDRESS."
    args = parse_command(CalibrateArgs(), words, "calibrate", what)
    path = default_path() if args.out is None else args.out
    if path is None:
        raise ConfigError(["RAYPAR_CALIBRATION is empty, so that nothing is used: give --out FILE"])
    ConfigError.raise_if(unwritable_faults(path))
    os.environ[VARIABLE] = ""  # the short runs are predicted without the calibration that is being made
    from raypar.calibration.calibrate import calibrate  # imports torch and Ray, which --help does not

    found = calibrate(args.seconds, say)
    write_calibration(found, path)
    return f"{calibration_lines(found)}\nwritten to {path}"


def calibration_lines(found: Calibration) -> str:
    """Return the main figures of a calibration in lines."""
    fastest = max(2 * one.rows * one.inner * one.columns / one.forward for one in found.products)
    lines = [
        f"{found.origin.processor}, {found.origin.cores} cores, in {found.origin.seconds:.0f} s",
        f"products up to {fastest / 1e9:,.0f} GFLOP/s, memory {found.memory / 1e9:.1f} GB/s",
        f"with all cores busy {found.busy:.2f} times as long",
    ]
    largest = {one.kind: one for one in sorted(found.besides, key=lambda one: one.size)}
    for kind, one in largest.items():
        if kind in _ONE_FIGURE:
            seconds = one.forward if kind == "split" else one.backward
            lines.append(f"{_ONE_FIGURE[kind]} {seconds * 1e3:.2f} ms")
            continue
        both = f"{one.forward * 1e3:.2f} and {one.backward * 1e3:.2f} ms forwards and backwards"
        taken = _OF_KIND.get(kind, f"a block of a {kind} takes")
        besides = "its product" if kind == "head" else "its products and attention"
        lines.append(f"{taken} {both} besides {besides}")
    lines.append(f"the process of an actor takes {size(found.process)}")
    for group in found.groups:
        if group.op == "all_reduce" and group.bytes == max(one.bytes for one in found.groups):
            rate = group.bytes / group.seconds / 1e9
            lines.append(f"all_reduce of {size(group.bytes)} among {group.members}: {rate:.2f} GB/s")
    return "\n".join(lines)
