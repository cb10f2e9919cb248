"""Two steps of many runs on actors, by the raypar of PYTHONPATH; ``same_bits`` runs this file with two trees.

    python runs_of_a_tree.py OUT.json [NAME ...]

Only public names of raypar are used, so that earlier commits have them, too.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import ray
import torch
from torch import nn

import raypar as rp

GPT = rp.GPT(layers=8, hidden=32, heads=4, seq=16, vocab=256, dropout=0.1)
MOE = replace(GPT, moe=rp.MoE(experts=4, top_k=2))
LLAMA = rp.Llama(layers=4, hidden=32, heads=4, seq=16, vocab=256)


def tokens(step: int, microbatch: int, dp: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens and the tokens after them, (2, 16) each."""
    generator = torch.Generator().manual_seed(step * 1000 + microbatch * 10 + dp)
    drawn = torch.randint(256, (2, 17), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def vectors(step: int, microbatch: int, dp: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random inputs (4, 8) and targets (4, 4)."""
    inputs = torch.rand(4, 8, generator=torch.Generator().manual_seed(step * 1000 + microbatch * 10 + dp))
    return inputs, inputs[:, :4]


def layers() -> list[nn.Module]:
    """Return layers of the user's own."""
    return [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)]


def run_of(model: rp.Model, **fields: object) -> rp.Run:
    """Return a run of two steps of four microbatches."""
    own = isinstance(model, rp.Layers)
    return rp.Run(model, data=rp.Batches(vectors if own else tokens), microbatches=4, steps=2, **fields)


PP = rp.Mesh(pp=2)
RUNS = {
    "one actor": run_of(GPT),
    **{name: run_of(GPT, mesh=PP, schedule=name) for name in ("1f1b", "interleaved", "zb-v", "dualpipe-v")},
    "pipedream": run_of(GPT, mesh=PP, schedule="pipedream", clip=None),
    **{f"zero {level}": run_of(GPT, mesh=rp.Mesh(dp=2), zero=level) for level in range(4)},
    "tp=2": run_of(GPT, mesh=rp.Mesh(tp=2)),
    "grid 2d:2x2": run_of(GPT, mesh=rp.Mesh(tp="2d:2x2")),
    "cp=2": run_of(replace(GPT, dropout=0.0), mesh=rp.Mesh(cp=2)),
    "ep=2": run_of(MOE, mesh=rp.Mesh(dp=2, ep=2)),
    "LoRA": run_of(replace(LLAMA, lora=rp.Lora(rank=4)), mesh=PP),
    "bf16": run_of(GPT, mesh=PP, precision=rp.Precision("bf16")),
    "own layers": run_of(rp.Layers(layers, loss=nn.functional.mse_loss), mesh=PP),
    "muon": run_of(GPT, mesh=rp.Mesh(dp=2), optim=rp.Muon()),
}


def bits_of(run: rp.Run) -> list[str]:
    """Return losses and gradient norms of a run's steps in hexadecimal, and a digest of its weights."""
    with rp.launch(run) as job:
        found = [f"{report.loss.hex()} {(report.grad_norm or 0.0).hex()}" for report in job.train()]
        digest = hashlib.sha256()
        for name, tensor in sorted(dict(job.weights()).items()):
            digest.update(name.encode() + tensor.detach().float().contiguous().numpy().tobytes())
    return [*found, digest.hexdigest()]


if __name__ == "__main__":
    out, *names = sys.argv[1:]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR", namespace="raypar")
    bits = {name: bits_of(run) for name, run in RUNS.items() if not names or name in names}
    Path(out).write_text(json.dumps(bits, indent=1))
