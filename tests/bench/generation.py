"""Tokens a second of generated text, on actors and beside ``transformers.generate``, with the weights of one folder.

python -m tests.bench.generation FOLDER [--tokens N] [--prompts N ...] [--rounds N] [--meshes pp=1 pp=2 tp=3 dp=2 ...]

Each side computes with one thread a process. The rounds take turns, and a side's figure is its median.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

import raypar as rp
from tests.bench.arguments import parse_words, parser_of
from tests.bench.foreign import Foreign, own_seconds
from tests.bench.local_ray import local_ray, quiet

PROMPTS = (
    "The history of the steam engine begins with",
    "def fibonacci(n):",
    "Once upon a time",
    "Water boils at 100 degrees, and",
    "A",
)


def main(words: Sequence[str] | None = None) -> None:
    """Print a row for each mesh and number of prompts."""
    parser = parser_of(__doc__)
    parser.add_argument("folder")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--meshes", nargs="+", default=["pp=1", "pp=2", "tp=3"])
    asked = parse_words(parser, words, "--tokens 2 --prompts 2 --meshes pp=2 --rounds 1")
    quiet()
    torch.set_num_threads(1)
    theirs = peer(asked.folder) if find_spec("transformers") else None
    ids = tokens_of(asked.folder)
    wanted = [continued(theirs, one, asked.tokens) for one in ids] if theirs else []
    with local_ray():
        for mesh in asked.meshes:
            axis, _, count = mesh.partition("=")
            with rp.launch(run_of(asked.folder, rp.Mesh(**{axis: int(count)}))) as job:
                made = [list(one.tokens) for one in job.generate(ids, asked.tokens, stop=[])]
                told = f"as transformers has it {made == wanted}" if theirs else "transformers is not installed"
                print(f"{mesh}, {len(ids)} prompts of unequal lengths: {told}", flush=True)
                for prompts in asked.prompts:
                    report(mesh, prompts, asked, job, theirs, ids[0])


def report(mesh: str, prompts: int, asked: argparse.Namespace, job: rp.Job, theirs: Any, ids: list[int]) -> None:
    """Measure both sides in turns, and print their tokens by seconds, also of CPU, and whether they are the same."""
    rows, foreign, count = [ids] * prompts, Foreign(), prompts * asked.tokens
    ours, others, same = list[tuple[float, float]](), list[tuple[float, float]](), True
    foreign.cores()
    for _ in range(asked.rounds):
        made, took = timed(lambda: [list(one.tokens) for one in job.generate(rows, asked.tokens, stop=[])])
        ours.append(took)
        if theirs is not None:
            found, took = timed(lambda: continued(theirs, rows, asked.tokens))
            others.append(took)
            same = same and found == made
    pace, by_cpu = (count / statistics.median(one) for one in zip(*ours, strict=True))
    paces = f"{by_cpu:.1f} a second of CPU"
    if others:
        other, other_by_cpu = (count / statistics.median(one) for one in zip(*others, strict=True))
        paces += f"; transformers {other:6.1f} and {other_by_cpu:.1f}, ratios {pace / other:.2f} and "
        paces += f"{by_cpu / other_by_cpu:.2f}, same {same}"
    used = f"others used {foreign.cores():.2f} cores"
    print(f"{mesh}, {prompts} prompts x {asked.tokens} tokens: {pace:6.1f} tokens/s, {paces}; {used}", flush=True)


def timed(call: Callable[[], list[Any]]) -> tuple[list[Any], tuple[float, float]]:
    """What a call returns; and its seconds, and those of CPU of this process and its actors."""
    begin, cpu = time.perf_counter(), own_seconds()
    found = call()
    return found, (time.perf_counter() - begin, max(own_seconds() - cpu, 1e-9))


def run_of(folder: str, mesh: rp.Mesh) -> rp.Run:
    """A run that is there to generate."""
    data = rp.Batches(lambda step, microbatch, dp: (torch.zeros(1, 8, dtype=torch.long),) * 2)
    sizes = {"microbatches": mesh.pp, "micro_batch_size": 1, "steps": 1}
    return rp.Run(model=rp.HF(folder), data=data, mesh=mesh, optim=rp.SGD(), device="cpu", timeout=300.0, **sizes)


def peer(folder: str) -> Any:
    """transformers' own model in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # each text gets all its tokens, as here
    return model


def continued(model: Any, rows: list[Any], count: int) -> list[Any]:
    """What transformers goes on with, greedily: for one prompt, or for several of one length."""
    ids = torch.tensor(rows if isinstance(rows[0], list) else [rows])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)[
        :, ids.shape[1] :
    ].tolist()
    return found if isinstance(rows[0], list) else found[0]


def tokens_of(folder: str) -> list[list[int]]:
    """The prompts as ids."""
    from tokenizers import Tokenizer

    model = Tokenizer.from_file(f"{folder}/tokenizer.json")
    return [model.encode(one, add_special_tokens=False).ids for one in PROMPTS]


if __name__ == "__main__":
    main()
