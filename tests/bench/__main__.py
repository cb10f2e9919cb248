"""raypar beside what a user would pick instead, measured in one run.

Every contestant trains the same model from the same weights on the same batches; all are up at once and take turns,
round by round, so that what the machine does besides meets all alike. A contestant that fails is named, with the end of
its log, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import raypar as rp
from raypar.actors.data.text.token_batches import open_corpus
from tests.bench.arguments import parse_words, parser_of
from tests.bench.contestants import CONTESTANTS, entered
from tests.bench.group_speed import NBYTES, measure_groups
from tests.bench.launches import time_launches
from tests.bench.local_ray import local_ray, quiet, terminable
from tests.bench.overhead import measure_overhead
from tests.bench.report import Findings, Heat
from tests.bench.rounds import run_rounds
from tests.bench.tables import write_block
from tests.bench.workload import CHOICES, SIZES, Size

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/benchmarks.md"


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line; ``only`` becomes a list of names."""
    parser = parser_of(__doc__)
    parser.prog = "python -m tests.bench"
    parser.add_argument("--size", choices=CHOICES, default="all", help="default: all")
    parser.add_argument("--only", metavar="NAME,...", default="", help=f"some of: {', '.join(CONTESTANTS)}")
    parser.add_argument("--rounds", type=int, metavar="N", default=7, help="default: 7")
    parser.add_argument("--steps", type=int, metavar="K", help="steps a round, default: the size's")
    parser.add_argument("--launches", type=int, metavar="N", default=3, help="launches of each, default: 3")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=ROOT / "runs/bench", help="default: runs/bench")
    parser.add_argument("--docs", action="store_true", help="replace the tables of docs/benchmarks.md too")
    parser.add_argument("--quick", action="store_true", help="some minutes: does it run? Its figures mean nothing")
    chosen = parse_words(parser, words, "--size smallest --only plain --rounds 2 --steps 1 --launches 0")
    chosen.only = [name for name in chosen.only.split(",") if name]
    unknown = [name for name in chosen.only if name not in CONTESTANTS]
    if unknown:
        parser.error(f"--only: no contestant {', '.join(unknown)}: there are {', '.join(CONTESTANTS)}")
    missing = SIZES[chosen.size].gpus - torch.cuda.device_count() if chosen.size in SIZES else 0
    if missing > 0:
        parser.error(
            f"--size {chosen.size}: no GPU here" if not torch.cuda.device_count() else "--size gpus: one GPU here"
        )
    if chosen.docs:
        try:
            write_block(PAGE.read_text(), "")  # told now, and not after a quarter of an hour
        except ValueError as error:
            parser.error(f"--docs: {error}")
    if chosen.quick and chosen.size != "all":
        parser.error(f"--quick has a size of its own: leave out one of --quick and --size {chosen.size}")
    for name in ("rounds", "steps"):
        if (number := getattr(chosen, name)) is not None and number < 1:
            parser.error(f"--{name} must be at least 1")
    if not sizes_of(chosen):
        parser.error(f"--size {chosen.size}: none of {', '.join(chosen.only)} takes part in it")
    return chosen


def sizes_of(chosen: argparse.Namespace) -> list[Size]:
    """What is run: sizes in which somebody named takes part, and those of GPUs only where there are so many."""
    if chosen.quick:
        return [SIZES["quick"]]
    sizes = [SIZES[name] for name in CHOICES[chosen.size] if SIZES[name].gpus <= torch.cuda.device_count()]
    named = [CONTESTANTS[name] for name in chosen.only or CONTESTANTS]
    return [size for size in sizes if any(contestant.fits(size) for contestant in named)]


def measure(chosen: argparse.Namespace, found: Findings) -> None:
    """Launches first, each alone; then, in one Ray, the rounds of every size, the overhead and the groups."""
    sizes, quick = sizes_of(chosen), chosen.quick
    rounds, launches = (2, 0) if quick else (chosen.rounds, chosen.launches)
    open_corpus(rp.Text(), 1)  # converted once, before anybody's launch is measured
    seconds = dict[str, list[float]]()
    for size in sizes:
        launched = [one for one in entered(size, chosen.only) if one.launched and one.name not in seconds]
        seconds |= time_launches(launched, size, launches, chosen.out)
    with local_ray():
        for size in sizes:
            steps = 1 if quick else chosen.steps or size.steps
            tracks = run_rounds(size, entered(size, chosen.only), rounds, steps, chosen.out)
            found.heats.append(Heat(size, rounds, steps, tracks))
            for name in tracks.keys() & seconds.keys():
                tracks[name].launches = seconds.pop(name)
        if not chosen.only:
            found.overhead = measure_overhead(50 if quick else 500)
            found.groups = measure_groups((2, 4), NBYTES[::3] if quick else NBYTES, 3 if quick else 5)


def write(found: Findings, folder: Path) -> None:
    """Keep what was found, as JSON, Markdown and text."""
    (folder / "bench.json").write_text(json.dumps(found.to_dict(), indent=1) + "\n")
    (folder / "bench.md").write_text(found.text(markdown=True))
    (folder / "bench.txt").write_text(found.text())


def main(words: Sequence[str] | None = None) -> int:
    """Measure, keep the tables and show them; 1 if a contestant failed."""
    chosen = parse(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    terminable()
    quiet()
    torch.set_num_threads(1)
    chosen.out.mkdir(parents=True, exist_ok=True)
    found = Findings()
    try:
        measure(chosen, found)
    finally:
        if found.heats:  # also of a bench that was broken off
            write(found, chosen.out)
    if chosen.docs:
        PAGE.write_text(write_block(PAGE.read_text(), found.text(markdown=True)))
    print(found.text())
    return int(any(track.failure for heat in found.heats for track in heat.tracks.values()))


if __name__ == "__main__":
    sys.exit(main())
