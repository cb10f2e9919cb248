"""Ranks in which contestants of the bench train, forked from one process that has imported torch for all of them.

    python -m tests.support.peer_ranks

It reads lines of JSON, ``[CONTESTANT, SIZE, PORT, STEPS]``, and answers each with the losses of so many steps, a list a
rank, or with the traceback of a rank that failed. The ranks of a contestant meet at the port.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from importlib import import_module

import torch

from tests.bench.child import build
from tests.bench.contestants import CONTESTANTS, REFERENCE
from tests.bench.workload import SIZES


def losses_of(name, size, rank, steps):
    """Train in this process. Return the losses, and the trainer to keep."""
    trainer = build(CONTESTANTS[name], SIZES[size], rank)
    losses = trainer.train(0, steps)
    trainer.close()
    return losses, trainer


def rank_of(name, size, rank, steps, environment):
    """Fork a rank: its process, and the file that its answer comes from."""
    there, here = os.pipe()
    if process := os.fork():
        os.close(here)
        return process, os.fdopen(there)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    status = 1
    try:
        # Torch's DDP holds the GIL while its end waits for Gloo's thread, which may wait for the GIL: a rank keeps it.
        answer, _kept = losses_of(name, size, rank, steps)
        status = 0
    except Exception:
        answer = traceback.format_exc()
    os.write(here, json.dumps(answer).encode())
    os._exit(status)


def trained(name, size, port, steps):
    """The losses of every rank, or why one failed, upon which the others are ended."""
    count = CONTESTANTS[name].processes
    environment = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = dict(rank_of(name, size, rank, steps, environment) for rank in range(count))
    running, failed = set(ranks), None
    while running:
        process, status = os.wait()
        running.discard(process)
        if status and failed is None:
            failed = process
            for other in running:
                os.kill(other, signal.SIGKILL)
    if failed is not None:
        return ranks[failed].read() or f"{name}: a rank was killed"
    return [json.loads(answer.read()) for answer in ranks.values()]


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a peer prints is no answer
    torch.set_num_threads(1)
    for peer in ("all_to_all", "ddp", "dtensor", "fsdp", "pipeline"):
        import_module(f"tests.bench.peers.{peer}")
    losses_of(REFERENCE, "smallest", 0, 1)  # imports what torch imports at a first step
    for line in sys.stdin:
        answers.write(json.dumps(trained(*json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
