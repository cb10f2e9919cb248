"""Damage a checkpoint at random, again and again: every damage has to be seen.

    python -m tests.long.checkpoint_damage [--flips 10000] [--truncations 2000] [--misplaced 500] [--seed 0]

A flip is of one bit of any file, the manifest included; a truncation cuts a file anywhere; a misplaced file is lost,
has changed places with another one, or is that of a later step. Exit code 1 if one is not seen.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from raypar.checkpoint import verify
from tests.support.checkpoints import flip, misplace, save_at, shorten

Damage = Callable[[Path, random.Random], None]


def unseen(path: Path, damage: Damage, times: int, draw: random.Random) -> int:
    """How many of so many damages, each to the sound checkpoint, are not seen."""
    sound = {file: file.read_bytes() for file in sorted(path.iterdir())}
    missed = 0
    for _ in range(times):
        damage(draw.choice(list(sound)), draw)
        missed += not verify(path)
        for file, raw in sound.items():
            file.write_bytes(raw)
    assert verify(path) == []
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default in (("flips", 10_000), ("truncations", 2_000), ("misplaced", 500), ("seed", 0)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    told = parser.parse_args()
    draw, total = random.Random(told.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        path, later = save_at(Path(folder), 1), save_at(Path(folder), 2)
        damages: dict[str, Damage] = {
            "flips": flip,
            "truncations": shorten,
            "misplaced": lambda file, draw: misplace(file, later, draw),
        }
        for name, damage in damages.items():
            times, start = getattr(told, name), time.perf_counter()
            missed = unseen(path, damage, times, draw)
            total += missed
            print(f"{name:12} {times:6} {missed:3} not seen, {time.perf_counter() - start:.1f} s")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
