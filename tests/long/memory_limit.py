"""A model whose weights alone are more than an actor may hold: what trains it, and what is ended by the limit.

    python -m tests.long.memory_limit [zero level] ... [--folder FOLDER]

Each actor limits its own memory when it builds the model: what it has then, and ALLOWED bytes more. Prints for each
level what became of three steps of four replicas; then, of one actor alone with each kind of offload, in host memory
or in files of a folder, and of a job that goes on from its checkpoint. Fails unless those train that shard or offload
parameters, and no others.
"""

from __future__ import annotations

import argparse
import re
import resource
import sys
import tempfile
from pathlib import Path

import ray
import torch
from torch import nn

import raypar as rp

LAYERS, WIDTH = 48, 1024
ALLOWED = 180 << 20  # bytes, less than the weights, which have 192 MiB
DP = 4
OFFLOADS = "none", "optimizer", "parameters"


def limited():
    """Limit the memory of this process, if it is an actor."""
    if ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None:
        held = int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (held + ALLOWED, resource.RLIM_INFINITY))


def layers():
    limited()
    return [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]


def batch(step, microbatch, dp):
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + dp)
    x = torch.randn(4, WIDTH, generator=generator)
    return x, x.roll(1, 1)


def outcome(dp=DP, saves=False, **changes):
    """The losses of three steps, and with ``saves`` whether a resumed job has the fourth one's; or what ended them."""
    run = rp.Run(
        model=rp.Layers(layers, nn.functional.mse_loss),
        data=rp.Batches(batch),
        mesh=rp.Mesh(dp=dp),
        microbatches=1,
        optim=rp.SGD(lr=0.1, momentum=0.0),
        steps=4,
        bucket_mb=1.0,
        **changes,
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            with rp.launch(run) as job:
                losses = [job.step().loss for _ in range(3)]
                if not saves:
                    return losses
                saved, after = job.save(folder), job.step().loss
            with rp.launch(run, resume=saved) as job:
                return losses, "the same after a resume" if job.step().loss == after else "ANOTHER LOSS after a resume"
    except (rp.JobError, rp.CheckpointError) as error:
        return str(error).splitlines()[0][:150]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("levels", nargs="*", type=int, default=[3, 2, 0])
    parser.add_argument("--folder", help="folder of offloaded files; host memory without")
    told = parser.parse_args()
    wrong = list[str]()
    for level in told.levels:
        print(f"zero={level}: {(became := outcome(zero=level))}", flush=True)
        if isinstance(became, list) != (level == 3):
            wrong.append(f"zero={level}")
    for offload in OFFLOADS:
        folder = {} if offload == "none" else {"offload_folder": told.folder}
        became = outcome(dp=1, saves=True, offload=offload, **folder)
        print(f"one actor, offload={offload}: {became}", flush=True)
        if (became[1:] == ("the same after a resume",)) != (offload == "parameters"):
            wrong.append(f"offload={offload}")
    sys.exit(f"not as it should be: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
