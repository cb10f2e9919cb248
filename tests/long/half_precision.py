"""bf16 and fp16 train gpt-tiny to a loss within 1 % of fp32's.

    python -m tests.long.half_precision [--steps 60]

Prints the mean loss of the last ten steps of each precision, and how many steps it skipped. Exit code 1 if one is off.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import raypar as rp
from tests.support.thread_jobs import TeamJob

BOUND = 0.01


def trained(run):
    """The mean loss of the last ten steps, and the number of steps that were skipped."""
    job = TeamJob(run)
    try:
        reports = [job.step() for _ in range(run.steps)]
    finally:
        job.close()
    return sum(report.loss for report in reports[-10:]) / 10, sum(bool(report.skipped) for report in reports)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    plain = replace(rp.recipe("gpt-tiny"), steps=steps, mesh=rp.Mesh(pp=1), optim=rp.AdamW(lr=3e-3, eps=1e-6))
    wanted, _ = trained(plain)
    print(f"fp32 {wanted:.4f}", flush=True)
    failed = False
    for compute in ("bf16", "fp16"):
        loss, skipped = trained(replace(plain, precision=rp.Precision(compute)))
        failed |= abs(loss / wanted - 1) > BOUND
        print(f"{compute} {loss:.4f} ({loss / wanted - 1:+.2%}), {skipped} steps skipped", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
