"""ZeRO 1, 2, 3 and hybrid sharding beside dp, pipelines, tp, cp, accumulation, own layers, ties, experts and tiles.

    python -m tests.long.zero_matrix [case] ...

Threads are the actors. Each run is verified against one plain process; where gradients are reduced once a step, losses,
gradients and weights must have the bits of zero=1. Prints a table: for each case and number of replicas what is bitwise
equal and the largest relative distance of a gradient. Exit code 1 if a case fails.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import raypar as rp
from tests.support.layouts import own_dice, tokens
from tests.support.team import batch
from tests.support.thread_jobs import TeamJob

GPT = rp.GPT(layers=4, hidden=16, heads=4, seq=8, vocab=11)
EXPERTS = rp.GPT(layers=4, hidden=16, heads=4, seq=8, vocab=11, moe=rp.MoE(experts=4, top_k=2, every=2))
TIED = rp.GPT(layers=4, hidden=16, heads=4, seq=8, vocab=11, tied=True)


def layers():
    shared = nn.Linear(4, 4)
    return [
        nn.Linear(4, 4),
        shared,
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)),
        shared,
        nn.LayerNorm(4),
    ]


OWN = {"model": rp.Layers(layers, nn.functional.mse_loss), "data": rp.Batches(batch)}
CASES = {
    "plain": ({}, {"microbatches": 1}),
    "pp=2 1f1b": ({"pp": 2}, {"microbatches": 4}),
    "pp=2 interleaved": ({"pp": 2}, {"microbatches": 4, "schedule": "interleaved"}),
    "tp=2": ({"tp": 2}, {}),
    "cp=2": ({"cp": 2}, {}),
    "accumulation 4": ({}, {"microbatches": 4}),
    "own layers": ({}, OWN),
    "own layers, pp=2": ({"pp": 2}, OWN | {"microbatches": 4}),
    "tied": ({}, {"model": TIED}),
    "tied, pp=2": ({"pp": 2}, {"model": TIED, "microbatches": 4}),
    "recompute full": ({}, {"recompute": "full"}),
    "recompute selective": ({}, {"recompute": "selective"}),
    "experts": ({}, {"model": EXPERTS}),
    "experts, ep=2": ({"ep": 2}, {"model": EXPERTS}),
    "experts, ep=2, pp=2": ({"ep": 2, "pp": 2}, {"model": EXPERTS}),
    "tiled, pp=2": ({"pp": 2}, {"tile": {"blocks.*.mlp.*": 4, "head.out": 11}, "microbatches": 4}),
    "tiled": ({}, {"tile": {"blocks.*.mlp.*": 4, "head.out": 11}}),
}
LEVELS = {
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 2, once": {"zero": 2, "zero_reduce": "step"},
    "zero 3": {"zero": 3},
    "zero 3, once": {"zero": 3, "zero_reduce": "step", "zero_gather": "step"},
}
BOUND = 2e-6  # relative distance of a gradient from zero 1


def trained(case, dp, level, hybrid):
    """The verdict of verify; losses and gradients of the job's last step, and its weights."""
    axes, fields = CASES[case]
    mesh = rp.Mesh(dp=dp, **axes, shard=dp * axes.get("cp", 1) // 2 if hybrid else None)
    run = rp.Run(
        **{"model": GPT, "data": rp.Batches(tokens), "microbatches": 2, "clip": 0.5} | fields | LEVELS[level],
        mesh=mesh,
        steps=2,
        optim=rp.AdamW(lr=1e-2, eps=1e-4),
        bucket_mb=0.002,
        timeout=30.0,
    )
    with own_dice():
        job = TeamJob(run)
        try:
            verdict = rp.verify(run, job)
            return verdict, job.gradients(), dict(job.weights().items())
        finally:
            job.close()


def distance(found, wanted):
    return max(
        float((found[name] - wanted[name]).norm() / (wanted[name].norm() or 1.0))
        for name in wanted
        if wanted[name] is not None
    )


def main() -> int:
    start, failed = time.perf_counter(), 0
    for case in sys.argv[1:] or CASES:
        divides = "ep" in CASES[case][0]  # into two parts, and not beside hybrid sharding
        for dp in (2, 4) if divides else (2, 3, 4):
            for hybrid in (False, True) if dp == 4 and not divides else (False,):
                told, first = [], None
                for level in LEVELS:
                    verdict, gradients, weights = trained(case, dp, level, hybrid)
                    first = first or (gradients, weights)
                    equal = all(torch.equal(weights[name], first[1][name]) for name in weights)
                    apart = distance(gradients, first[0])
                    fine = verdict.ok and (equal if "once" in level or level == "zero 1" else apart <= BOUND)
                    failed += not fine
                    told.append(f"{'' if fine else 'FAILS '}{'bitwise' if equal else f'{apart:.1e}'}")
                    if not verdict.ok:
                        print(verdict)
                print(f"{case:20} dp={dp}{' shard' if hybrid else '':6} {'  '.join(told)}", flush=True)
    print(f"{failed} fail, {time.perf_counter() - start:.0f} s; columns: {', '.join(LEVELS)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
