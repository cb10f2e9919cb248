"""Generation: the same tokens and logits on every mesh as by whole forwards of one plain model."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
import torch

import raypar as rp
from raypar.actors.specs.sampling import Sampling
from raypar.actors.worker import generation as worker_generation
from tests.support.generation import GPT, LLAMA, PROMPTS, TeamGeneration, plain_texts, run_of, team_texts, whole_logits

SAMPLED = Sampling(temperature=1.0, top_k=20, top_p=0.95, seed=3)
MESHES = {
    "one": {},
    "pp2": {"mesh": rp.Mesh(pp=2)},
    "pp2 interleaved": {"mesh": rp.Mesh(pp=2), "schedule": "interleaved", "chunks": 2},
    "zb-v": {"mesh": rp.Mesh(pp=2), "schedule": "zb-v"},
    "tp2": {"mesh": rp.Mesh(tp=2)},
    "pp2 tp2": {"mesh": rp.Mesh(pp=2, tp=2)},
    "tp2 sequence": {"mesh": rp.Mesh(tp=2), "sequence_parallel": True},
    "dp2": {"mesh": rp.Mesh(dp=2)},
    "dp2 zero3": {"mesh": rp.Mesh(dp=2), "zero": 3},
    "pp2 dp2 zero3": {"mesh": rp.Mesh(pp=2, dp=2), "zero": 3},
}


@pytest.mark.parametrize("mesh", MESHES)
def test_tokens_are_the_same_on_every_mesh(mesh):
    with closing(TeamGeneration(run_of(**MESHES[mesh]))) as generation:
        for sampling in (Sampling(), SAMPLED):
            assert generation.tokens(PROMPTS, 6, sampling) == plain_texts(LLAMA, PROMPTS, 6, sampling)
        assert generation.tokens(PROMPTS[:1], 6) == plain_texts(LLAMA, PROMPTS[:1], 6), "fewer prompts than seats"
