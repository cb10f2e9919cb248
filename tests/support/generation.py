"""Generation without Ray: on a Team, and by whole forwards of a plain model, which keeps nothing."""

from __future__ import annotations

from contextlib import closing
from functools import cache

import torch

import raypar as rp
from raypar.actors.models.build import build_model
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.sampling import Sampling
from raypar.actors.worker.generation import choose
from raypar.job.start.loaded_run import LoadedRun
from raypar.job.text.generation import TextGeneration, request_of
from raypar.reporting.tables.memory_table import memory_table
from tests.support.team import Team
from tests.support.thread_jobs import Hands

LLAMA = rp.Llama(layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=64, seq=32)
GPT = rp.GPT(layers=4, hidden=32, heads=4, vocab=64, seq=32)
GREEDY = Sampling()
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [11, 12, 13], [20, 21], [31, 30, 29, 28, 27]]


def run_of(model=LLAMA, **changes):
    fields = {"model": model, "data": rp.Batches(_unused), "microbatches": 4, "micro_batch_size": 4, "steps": 1}
    return rp.Run(**(fields | {"timeout": 20.0} | changes))


def _unused(step, microbatch, dp):
    ids = torch.zeros(4, 8, dtype=torch.int64)
    return ids, ids


@cache
def plain_layers(model, seed=0):
    built = build_model(model, seed)
    return [layer.eval() for layer in built.materialize(range(len(built.names)), seed)]


@torch.no_grad()
def whole_logits(model, tokens, seed=0):
    """Logits (S, V) of a whole sequence."""
    x = torch.tensor([tokens])
    for layer in plain_layers(model, seed):
        x = layer(x)
    return x[0]


def plain_texts(model, prompts, count, sampling=GREEDY, seed=0):
    """The new tokens of each prompt, each by a forward of the whole sequence before it."""
    made = []
    for number, prompt in enumerate(prompts):
        tokens = list(prompt)
        for _ in range(count):
            logits = whole_logits(model, tokens, seed)[-1:]
            tokens.append(int(choose(logits, sampling, [number], [len(tokens)])))
        made.append(tuple(tokens[len(prompt) :]))
    return made


class TeamGeneration:
    """Generations of a run on a Team."""

    def __init__(self, run):
        self.team = Team.of(run)
        self.hands = Hands(self.team)
        skeleton = Skeleton(run.model, run.seed)
        self.loaded = LoadedRun(run, self.hands.schedule, self.team.world, self.hands.calls, skeleton)

    def start(self, prompts, count, sampling=GREEDY, stop=None):
        request = request_of(self.loaded.run, prompts, count, sampling, stop)
        return TextGeneration(request, lambda: self.loaded, lambda call: call())

    def tokens(self, prompts, count, sampling=GREEDY, stop=None):
        return [one.tokens for one in self.start(prompts, count, sampling, stop).run()]

    def memory(self):
        held = [actor.held() for actor in self.team.all]
        return memory_table(self.loaded.run, self.hands.schedule, self.loaded.skeleton, held)

    def close(self):
        self.hands.close()


def team_texts(run, prompts, count, sampling=GREEDY):
    with closing(TeamGeneration(run)) as generation:
        return generation.tokens(prompts, count, sampling)
