"""A rank in which contestants of the bench train one after another, so that torch is imported once for all of them.

    python -m tests.support.peer_ranks

It reads lines of JSON, ``[CONTESTANT, SIZE, PORT, STEPS]``, and answers each with the losses of so many steps. RANK,
WORLD_SIZE and MASTER_ADDR are those of its environment; the ranks of a contestant meet at the port.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from tests.bench.child import build
from tests.bench.contestants import CONTESTANTS
from tests.bench.workload import SIZES


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a peer prints is no answer
    torch.set_num_threads(1)
    for line in sys.stdin:
        name, size, port, steps = json.loads(line)
        os.environ["MASTER_PORT"] = str(port)
        trainer = build(CONTESTANTS[name], SIZES[size], int(os.environ["RANK"]))
        losses = trainer.train(0, steps)
        trainer.close()
        answers.write(json.dumps(losses) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
