"""Faults at all points of a step, on all actors, of all kinds: each run must end with the bits of the undisturbed one.

    python -m tests.long.recovery_points [LAYOUT ...] [--seed N] [--each N]

A case is an actor, a point (an action of its row, or one between two steps) and a kind (kill, stop, raise, delay). A
run has a case in every second step, in an order drawn from the seed. Then come runs that lose several actors at once,
and others while they recover. Prints a line for each run: its faults, the failures that it survived, and what was
wrong. ``--each`` is the most cases of a layout (0: all). Exit code: the number of runs that went wrong.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random

import torch
from torch import nn

import raypar as rp
from raypar.actors.specs.injected_fault import InjectedFault
from raypar.actors.specs.worlds import world_of
from raypar.cluster.calls import deadline
from raypar.config.run import check_run

KINDS = "kill", "stop", "raise", "delay"
BETWEEN = "end", "snapshot", "report"
PER_RUN = 12  # cases of a run
SLEEP = 60.0  # seconds of a delay: longer than any deadline here

DENSE = rp.GPT(layers=4, hidden=32, heads=2, seq=16, dropout=0.1, tied=True)
EXPERTS = rp.GPT(layers=4, hidden=32, heads=2, seq=16, dropout=0.1, moe=rp.MoE(experts=4, top_k=2))
FP16 = {"precision": rp.Precision("fp16"), "loss_scale": rp.LossScale(init=2.0**24)}


class Normed(nn.Module):
    """A layer with buffers: running means, and a number of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's outputs."""
        normed: torch.Tensor = self.norm(self.linear(x))
        return normed.tanh()


def batch(step: int, microbatch: int, dp: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch; in every fifth step one microbatch is not finite."""
    draw = torch.Generator().manual_seed(1000 * step + 10 * microbatch + dp)
    x = torch.randn(4, 6, generator=draw)
    if step % 5 == 2 and microbatch == 1:
        x[0, 0] = torch.nan
    return x, torch.randn(4, 6, generator=draw)


def finite(step: int, microbatch: int, dp: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch."""
    draw = torch.Generator().manual_seed(1000 * step + 10 * microbatch + dp)
    return torch.randn(4, 6, generator=draw), torch.randn(4, 6, generator=draw)


def own(data: object, **fields: object) -> rp.Run:
    """Return a run of own layers with buffers."""
    model = rp.Layers(lambda: [Normed() for _ in range(4)], nn.functional.mse_loss)
    return rp.Run(model=model, data=rp.Batches(data), **fields)  # type: ignore[arg-type]


def gpt(mesh: rp.Mesh, model: rp.GPT = DENSE, **fields: object) -> rp.Run:
    """Return a run of a small GPT."""
    return rp.Run(model=model, mesh=mesh, **fields)  # type: ignore[arg-type]


LAYOUTS = {
    "pp2": gpt(rp.Mesh(pp=2)),
    "pp2-dp2": gpt(rp.Mesh(pp=2, dp=2)),
    "tp2": gpt(rp.Mesh(tp=2), sequence_parallel=True),
    "cp2": gpt(rp.Mesh(cp=2)),
    "dp2-zero3": gpt(rp.Mesh(dp=2), zero=3),
    "hybrid": gpt(rp.Mesh(dp=4, shard=2), zero=3),
    "expert-actors": gpt(rp.Mesh(dp=2, expert_actors=2), EXPERTS),
    "ep2": gpt(rp.Mesh(dp=2, ep=2), EXPERTS),
    "servers": gpt(rp.Mesh(pp=2, dp=2), data_parallel="parameter_server"),
    "interleaved": gpt(rp.Mesh(pp=2), schedule="interleaved"),
    "split": gpt(rp.Mesh(pp=2), backward="split"),
    "fp16": gpt(rp.Mesh(pp=2), **FP16),
    "offload": gpt(rp.Mesh(dp=2), zero=2, offload="optimizer"),
    "offload-all": gpt(rp.Mesh(pp=2), offload="parameters"),
    "buffers": own(finite, mesh=rp.Mesh(pp=2, dp=2)),
    "skip": own(batch, mesh=rp.Mesh(pp=2), nonfinite="skip"),
    "every3": gpt(rp.Mesh(pp=2), snapshot_every=3),
}


@dataclass(frozen=True)
class Outcome:
    """What a run has made: its losses, its weights, and its failures."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    failures: tuple[rp.Failure, ...]

    def like(self, other: Outcome) -> bool:
        """Return whether losses and weights have the same bits; nan is nan."""
        return repr(self.losses) == repr(other.losses) and all(
            torch.equal(weight, other.weights[name]) for name, weight in self.weights.items()
        )


def single(run: rp.Run, draw: Random, most: int) -> Iterator[list[InjectedFault]]:
    """Yield the faults of runs with one case in every second step."""
    world, schedule, cases = world_of(run), check_run(run)["train"], list[tuple[str, str, str]]()
    for rank in range(world.size):
        served = rank in world.server_ranks
        row = ["STEP"] if served else [str(action) for action in schedule.rows[world.pp(rank)]]
        cases += product([world.label(rank)], [*dict.fromkeys(row), *BETWEEN], KINDS)
    draw.shuffle(cases)
    cases = cases[: most or None]
    for first in range(0, len(cases), PER_RUN):
        yield [
            InjectedFault(kind, label, at, 2 * number + 1, SLEEP if kind == "delay" else 0.0)  # type: ignore[arg-type]
            for number, (label, at, kind) in enumerate(cases[first : first + PER_RUN])
        ]


def several(run: rp.Run, draw: Random) -> list[InjectedFault]:
    """Draw the faults of a run in which actors fail together, fail again in the step, and fail in recoveries."""
    world, found = world_of(run), list[InjectedFault]()
    labels = [world.label(rank) for rank in range(world.size)]
    for step in (2, 5, 8):
        for label in draw.sample(labels, draw.randint(2, len(labels))):
            kind, at = draw.choice(KINDS), draw.choice(["STEP", *BETWEEN])
            found.append(InjectedFault(kind, label, at, step, SLEEP if kind == "delay" else 0.0))  # type: ignore[arg-type]
    for generation in (2, 3, 5):
        kind = draw.choice(["kill", "raise", "stop"])
        found.append(InjectedFault(kind, draw.choice(labels), "start", generation))  # type: ignore[arg-type]
    return [*found, InjectedFault("kill", labels[-1], "STEP", 10, times=2)]


def trained(run: rp.Run, chaos: Sequence[InjectedFault]) -> Outcome:
    """Train a run with faults."""
    with rp.launch(run, chaos=chaos) as job:
        losses = [report.loss for report in job.train()]
        return Outcome(losses, {name: weight.clone() for name, weight in job.weights().items()}, job.failures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=0)
    chosen = parser.parse_args()
    logging.getLogger("raypar").handlers = [logging.NullHandler()]
    deadline._FLOOR, deadline._LOST = 4.0, 3.0  # as waiting is not what is tested
    bad = cases = recoveries = 0
    for name in chosen.layouts or LAYOUTS:
        steps = 2 * PER_RUN + 1
        run = replace(LAYOUTS[name], steps=steps, microbatches=2, timeout=60.0, max_failures=99)
        draw, whole = Random(f"{chosen.seed} {name}"), trained(replace(run, max_failures=0), [])
        for faults in [*single(run, draw, chosen.each), *[several(run, draw) for _ in range(world_of(run).size)]]:
            start, wrong = time.monotonic(), ""
            try:
                outcome = trained(run, faults)
                count = len(outcome.failures)
                wrong = "" if outcome.like(whole) else "OTHER NUMBERS"
            except rp.JobError as error:
                count, wrong = 0, f"ENDED: {error} {getattr(error, '__notes__', '')}"
            cases, recoveries, bad = cases + len(faults), recoveries + count, bad + bool(wrong)
            told = f"{len(faults)} faults, {count} failures survived, {time.monotonic() - start:.0f} s"
            print(f"{name}: {told}: {wrong or 'same bits'}", flush=True)
            if wrong:
                print(
                    *[f"    {fault}" for fault in faults],
                    *[f"    {f.step} {f.reason}: {f}" for f in outcome.failures if count],
                    sep="\n",
                    flush=True,
                )
    print(f"{cases} faults, {recoveries} recoveries, {bad} runs went wrong")
    return bad


if __name__ == "__main__":
    sys.exit(main())
