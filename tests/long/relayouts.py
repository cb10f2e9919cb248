"""A run goes through layouts on real actors; what moves is held against the least, and losses against the undisturbed.

    python -m tests.long.relayouts [--steps 3] [--hidden 256]

The model has experts. Prints for each relayout the bytes that its actors need, the bytes that were sent, the least, and
how long it took, then how far the losses are from those of the run that stays as it is. Exit code 1 if losses are
further apart than 1e-5, or more than 5 % above the least was sent.
"""

from __future__ import annotations

import argparse
import sys

import raypar as rp

CHAIN = (
    {"mesh": rp.Mesh(tp=2)},
    {"mesh": rp.Mesh(dp=2), "zero": 3},
    {"mesh": rp.Mesh(pp=2, dp=2), "zero": None},
    {"mesh": rp.Mesh(dp=2, ep=2)},
    {"mesh": rp.Mesh(pp=2)},
)
LOSSES, BYTES = 1e-5, 1.05  # how far losses may be apart, and the bytes from the least


def run_of(hidden):
    model = rp.GPT(layers=4, hidden=hidden, heads=4, seq=64, dropout=0.1, moe=rp.MoE(experts=4, top_k=2))
    return rp.Run(model=model, mesh=rp.Mesh(pp=2), microbatches=4, steps=100, timeout=120.0)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3, help="steps in each layout")
    parser.add_argument("--hidden", type=int, default=256)
    given = parser.parse_args()
    run, found, wrong = run_of(given.hidden), [], False
    with rp.launch(run) as job:
        losses = [report.loss for report in job.train(given.steps)]
        for changes in CHAIN:
            one = job.relayout(**changes)
            wrong |= one.sent > BYTES * one.least
            found.append(f"{one.before:>14} -> {one.after:<14} {one.needed:>12,} {one.sent:>12,} {one.least:>12,}")
            found[-1] += f" {one.seconds:6.2f} s, {one.launched} launched"
            losses += [report.loss for report in job.train(given.steps)]
    with rp.launch(run) as job:
        stays = [report.loss for report in job.train(len(losses))]
    print(f"{'':31} {'needed':>12} {'sent':>12} {'least':>12}", *found, sep="\n")
    apart = max(abs(one - other) for one, other in zip(losses, stays, strict=True))
    print(f"losses of {len(losses)} steps are apart by {apart:.1e} at the most")
    return int(wrong or apart > LOSSES)


if __name__ == "__main__":
    sys.exit(main())
