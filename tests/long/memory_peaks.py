"""The peak memory of actors in a step, beside what the planner says: levels of ZeRO, and placements of gathers.

    python -m tests.long.memory_peaks [--wide] [--only TEXT]

Each run has new actors, because a process keeps the memory that it has had. Prints in MiB, for the actor whose peak
is farthest from its formula: state, gathered, buckets and peak, formula / measured. Exit code 1 if a state or what is
gathered is off by more than 3 %, or a peak by more than 10 %.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import raypar as rp
from tests.bench.local_ray import local_ray

STATE, PEAK = 0.03, 0.10  # how far measurements may be from the formulas
MIB = 1 << 20
PLACEMENTS = {
    "layer by layer": {},
    "4 layers a unit": {"zero_units": 4},
    "kept for the backward": {"reshard_after_forward": False},
    "once a step": {"zero_gather": "step", "zero_reduce": "step"},
}
PIPE = {"mesh": rp.Mesh(pp=2, dp=2), "microbatches": 4}
INTERLEAVED = PIPE | {"schedule": "interleaved"}


def cases():
    """The changes of every run, by name."""
    for level in range(4):
        yield f"zero {level}", {"zero": level}
    yield "zero 2, reduced once a step", {"zero": 2, "zero_reduce": "step"}
    for name, changes in list(PLACEMENTS.items())[1:]:
        yield f"zero 3, {name}", {"zero": 3} | changes
    for level in range(3):
        yield f"pp=2, zero {level}", {"zero": level} | PIPE
    for name, changes in PLACEMENTS.items():
        yield f"pp=2, zero 3, {name}", {"zero": 3} | PIPE | changes
    for resident in (1, 2):
        gather = {"zero": 3, "zero_gather": "step", "zero_reduce": "step", "zero_resident": resident}
        yield f"interleaved, {resident} resident", INTERLEAVED | gather
    for level in range(4):
        yield f"dp=4, zero {level}", {"zero": level, "mesh": rp.Mesh(dp=4), "microbatches": 2}
    half = {"precision": rp.Precision("bf16")}
    yield "zero 3, bf16", {"zero": 3} | half
    for name, changes in (("fp32", {}), ("bf16", half)):
        yield f"many tokens, {name}", {"micro_batch_size": 8, "microbatches": 2} | changes


def measured(run):
    """The figures of the actor whose peak is farthest from its formula, after two steps."""
    with rp.launch(run) as job:
        job.train(2)
        return max(job.memory().values(), key=lambda figures: off(figures["peak"]))


def off(figure):
    """How far a measurement is from its formula, as a part of the formula."""
    return abs(figure.measured / figure.formula - 1) if figure.formula else 0.0


def is_off(name, run):
    """Measure a run, and print a line for it."""
    figures = measured(run)
    state = [figures[kind] for kind in ("weights", "gradients", "optimizer")]
    sums = [sum(figure[place] for figure in state) for place in range(2)]
    wrong = abs(sums[1] / sums[0] - 1) > STATE or off(figures["peak"]) > PEAK
    wrong |= "gathered" in figures and off(figures["gathered"]) > STATE
    shown = [sums, *(figures.get(kind, (0, 0)) for kind in ("gathered", "buckets", "peak"))]
    cells = "".join(f"{f'{one[0] / MIB:.0f}/{one[1] / MIB:.0f}':>12}" for one in shown)
    print(f"{name:<36}{cells} {off(figures['peak']):6.1%}{' FAILS' if wrong else ''}", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wide", action="store_true", help="two layers of hidden size 1024: many weights, few tokens")
    parser.add_argument("--only", default="", help="only runs whose names have this text")
    told = parser.parse_args()
    deep, wide = rp.GPT(layers=8, hidden=512, heads=8, seq=128), rp.GPT(layers=4, hidden=1024, heads=8, seq=64)
    model = wide if told.wide else deep
    run = rp.Run(model=model, mesh=rp.Mesh(dp=2), micro_batch_size=1, microbatches=4, steps=2, optim=rp.AdamW())
    print(f"{'MiB, formula / measured':<36}{'state':>11}{'gathered':>11}{'buckets':>11}{'peak':>13}")
    with local_ray():
        failed = sum(is_off(name, replace(run, **changes)) for name, changes in cases() if told.only in name)
    print(f"{failed} fail")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
