"""Small runs whose microbatches and replicas have unequal counts of targets."""

from __future__ import annotations

import torch

import raypar as rp

VOCAB = 29


def uneven(step, microbatch, dp):
    """Two sequences of 8 tokens, of which other numbers count in each microbatch and replica."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + dp)
    x = torch.randint(0, VOCAB, (2, 8), generator=generator)
    y = torch.randint(0, VOCAB, (2, 8), generator=generator)
    y.view(-1)[(16, 4, 9, 1)[(2 * microbatch + dp + step) % 4] :] = -100
    return x, y


def run_of(model, **settings):
    fields = {"data": rp.Batches(uneven), "microbatches": 2, "micro_batch_size": 2, "steps": 4, "device": "cpu"}
    fields |= {"optim": rp.SGD(lr=0.2), "clip": None, "timeout": 20.0}
    return rp.Run(model=model, **(fields | settings))


def gpt(**fields):
    return rp.GPT(**({"layers": 2, "hidden": 16, "heads": 4, "seq": 8, "vocab": VOCAB} | fields))


def llama(**fields):
    return rp.Llama(**({"layers": 2, "hidden": 16, "heads": 4, "seq": 8, "vocab": VOCAB} | fields))
