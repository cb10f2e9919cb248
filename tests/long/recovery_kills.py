"""Runs whose actors are killed again and again: losses and weights must have the bits of the undisturbed run.

    python -m tests.long.recovery_kills [LAYOUT ...] [--kills N] [--steps N] [--seed N] [--kinds kill,stop,raise,delay]
        [--spares N [--warm]]

Faults are drawn anew from the seed: of any actor, at any action of its row or between two steps. Prints how long
recoveries took, from the failure's being known until all actors could go on. With ``--warm`` the next step waits until
all spares are there again, so that each failure finds them.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import torch

import raypar as rp
from raypar.actors.specs.injected_fault import InjectedFault
from raypar.actors.specs.worlds import world_of
from raypar.config.run import check_run
from tests.support.full_cluster import wait_for_actors

DENSE = rp.GPT(layers=4, hidden=64, heads=4, seq=32, dropout=0.1)
EXPERTS = rp.GPT(layers=4, hidden=64, heads=4, seq=32, dropout=0.1, moe=rp.MoE(experts=4, top_k=2))
LAYOUTS = {
    "pp2": rp.Run(model=DENSE, mesh=rp.Mesh(pp=2)),
    "pp4": rp.Run(model=DENSE, mesh=rp.Mesh(pp=4)),
    "pp2-dp2": rp.Run(model=DENSE, mesh=rp.Mesh(pp=2, dp=2)),
    "tp2": rp.Run(model=DENSE, mesh=rp.Mesh(tp=2)),
    "dp2-zero3": rp.Run(model=DENSE, mesh=rp.Mesh(dp=2), zero=3),
    "expert-actors": rp.Run(model=EXPERTS, mesh=rp.Mesh(dp=2, expert_actors=2)),
    "dp3-zero1": rp.Run(model=DENSE, mesh=rp.Mesh(dp=3), zero=1, ema=0.9),
    "dp2-zero1-muon": rp.Run(model=DENSE, mesh=rp.Mesh(dp=2), zero=1, optim=rp.Muon()),
    "pp2-dp2-zero2": rp.Run(model=DENSE, mesh=rp.Mesh(pp=2, dp=2), zero=2, schedule="interleaved"),
    "dp4-hybrid-zero3": rp.Run(model=DENSE, mesh=rp.Mesh(dp=4, shard=2), zero=3),
    "tp2-dp2-zero3": rp.Run(model=DENSE, mesh=rp.Mesh(tp=2, dp=2), zero=3),
    "ep2-zero2": rp.Run(model=EXPERTS, mesh=rp.Mesh(dp=2, ep=2), zero=2),
    "dp2-zero3-bf16": rp.Run(model=DENSE, mesh=rp.Mesh(dp=2), zero=3, precision=rp.Precision("bf16")),
    "dp2-zero2-offload": rp.Run(model=DENSE, mesh=rp.Mesh(dp=2), zero=2, offload="optimizer"),
    "cp2-zero1": rp.Run(model=DENSE, mesh=rp.Mesh(cp=2), zero=1),
}


def drawn(run: rp.Run, kinds: list[str], count: int, draw: Random) -> Iterator[InjectedFault]:
    """Yield faults in different steps, or as many as there are steps."""
    world, schedule = world_of(run), check_run(run)["train"]
    for step in sorted(draw.sample(range(1, run.steps + 1), min(count, run.steps))):
        rank, kind = draw.randrange(world.size), draw.choice(kinds)
        row = [str(action) for action in schedule.rows[world.pp(rank)]]
        at = draw.choice([*row, "snapshot", "end"]) if draw.random() < 0.8 else draw.choice(["STEP", "snapshot", "end"])
        yield InjectedFault(kind, world.label(rank), at, step, seconds=60.0 if kind == "delay" else 0.0)  # type: ignore[arg-type]


def trained(
    run: rp.Run, chaos: list[InjectedFault], *, warm: bool = False
) -> tuple[list[float], dict[str, torch.Tensor], tuple[rp.Failure, ...]]:
    with rp.launch(run, chaos=chaos) as job:
        actors = world_of(run).size + run.spares
        on = (lambda _: wait_for_actors(job, actors)) if warm else None
        losses = [report.loss for report in job.train(on=on)]
        return losses, dict(job.weights().items()), job.failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--kinds", default="kill")
    chosen = parser.parse_args()
    logging.getLogger("raypar").setLevel(logging.ERROR)
    bad = 0
    for name in chosen.layouts or LAYOUTS:
        settings = {"steps": chosen.steps, "max_failures": 10 * chosen.kills, "spares": chosen.spares}
        run = replace(LAYOUTS[name], microbatches=4, timeout=30.0, **settings)
        faults = list(drawn(run, chosen.kinds.split(","), chosen.kills, Random(f"{chosen.seed} {name}")))
        losses, weights, _ = trained(run, [])
        start = time.monotonic()
        found, kept, failures = trained(run, faults, warm=chosen.warm)
        seconds = [failure.seconds for failure in failures]
        redone = max((failure.step - 1 - failure.back_to for failure in failures), default=0)
        same = found == losses and all(torch.equal(weights[key], kept[key]) for key in weights)
        bad += not same or redone > 1
        print(
            f"{name}: {'same bits' if same else 'OTHER NUMBERS'}, {len(failures)} failures of {len(faults)} faults in "
            f"{run.steps} steps, {time.monotonic() - start:.0f} s; recovery median {statistics.median(seconds):.2f} s, "
            f"max {max(seconds):.2f} s; at most {redone} committed steps redone",
            flush=True,
        )
    return bad


if __name__ == "__main__":
    sys.exit(main())
