"""A long sequence on one actor and on two: loss, seconds and memory of a step.

python -m tests.bench.long_sequence [TOKENS] [--context ring|all_gather|ulysses|rsa] [--cp N ...] [--layers N]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

import raypar as rp
from tests.bench.arguments import parse_words, parser_of
from tests.bench.local_ray import local_ray, quiet

MIB = 2**20


def batch(seq: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A sequence (1, S) of ids that repeats itself, and the same one token later."""
    ids = torch.randint(64, (1, 512), generator=torch.Generator().manual_seed(step)).repeat(1, seq // 512 + 1)
    return ids[:, :seq], ids[:, 1 : seq + 1]


def main(words: Sequence[str] | None = None) -> None:
    """Print a row for each number of actors: the same run, a process for each sequence part."""
    parser = parser_of(__doc__)
    parser.add_argument("tokens", type=int, nargs="?", default=16_384)
    parser.add_argument("--context", default="ring")
    parser.add_argument("--cp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1)
    asked = parse_words(parser, words, "128 --layers 1 --hidden 32")
    quiet()
    with local_ray():
        print(f"{asked.tokens:,} tokens, {asked.context}; memory beyond that of a run on 64 tokens")
        (base,) = trained(64, 1, asked).peak_memory
        for cp in asked.cp:
            report = trained(asked.tokens, cp, asked)
            (peak,) = report.peak_memory
            print(f"cp={cp}  loss {report.loss:.6f}  {report.step_ms / 1e3:6.2f} s  {(peak - base) / MIB:7,.0f} MiB")


def trained(tokens: int, cp: int, asked: argparse.Namespace) -> rp.Report:
    """The last step of a run."""
    run = rp.Run(
        model=rp.GPT(layers=asked.layers, hidden=asked.hidden, heads=4, seq=tokens, vocab=64, positions="rope"),
        data=rp.Batches(lambda step, microbatch, dp: batch(tokens, step)),
        mesh=rp.Mesh(cp=cp),
        microbatches=1,
        micro_batch_size=1,
        context=asked.context,
        steps=asked.steps,
        device="cpu",
    )
    with rp.launch(run) as job:
        return job.train()[-1]


if __name__ == "__main__":
    main()
