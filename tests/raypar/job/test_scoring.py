"""Scores of texts are those of one plain process, on every mesh."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from math import log

import pytest
import torch

import raypar as rp
from raypar.job.text.scoring import Scored, scores
from tests.raypar.job.test_generation import LLAMA, run_of, whole_logits
from tests.support.generation import TeamGeneration

TEXTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [9, 3, 2]]


def scored(run, texts, batch=1):
    with closing(TeamGeneration(run)) as team:
        return scores(lambda: team.loaded, lambda call: call(), texts, batch)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mesh": rp.Mesh(pp=2)},
        {"mesh": rp.Mesh(pp=2, tp=2), "sequence_parallel": True},
        {"mesh": rp.Mesh(dp=2, tp=2)},
    ],
    ids=str,
)
def test_scores_are_those_of_one_process(changes):
    found = scored(run_of(**changes), TEXTS)
    for text, one in zip(TEXTS, found, strict=True):
        logs = torch.log_softmax(whole_logits(LLAMA, text[:-1]), -1)
        wanted = [logs[at, token].item() for at, token in enumerate(text[1:])]
        assert one.tokens == tuple(text)
        assert one.logs == pytest.approx(wanted, abs=1e-5)
        assert one.likeliest == tuple(logs[at].argmax().item() == token for at, token in enumerate(text[1:]))
        assert one.num_bytes is None


def test_a_vocabulary_that_tensor_ranks_can_not_divide_equally_is_scored():
    model = replace(LLAMA, vocab=67, kv_heads=4)
    for text, one in zip(TEXTS, scored(run_of(model, mesh=rp.Mesh(tp=4)), TEXTS), strict=True):
        logs = torch.log_softmax(whole_logits(model, text[:-1]), -1)
        assert one.logs == pytest.approx([logs[at, token].item() for at, token in enumerate(text[1:])], abs=1e-5)


def test_bits_per_byte_are_of_all_tokens_and_bytes():
    assert Scored((1, 2, 3), (-log(2), -log(8)), (True, False), 8).bits_per_byte == pytest.approx(0.5)
    with pytest.raises(ValueError, match="given as token ids: give texts"):
        Scored((1, 2), (-1.0,), (True,)).bits_per_byte  # noqa: B018


def test_what_can_not_be_scored_is_told():
    assert scored(run_of(), []) == []
    with pytest.raises(rp.ConfigError) as error:
        scored(run_of(), [[1], [1, 2], [2]])
    assert error.value.faults == [
        f"text {number} has 1 token, and the first one is not scored: give two at least" for number in (0, 2)
    ]
    with pytest.raises(
        rp.ConfigError, match="prompt 0 has 34 tokens, and the model has 32 positions: shorten it to 33"
    ):
        scored(run_of(), [[1] * 34])


def test_a_text_may_have_one_token_more_than_the_model_has_positions():
    text = [(7 * number) % 64 for number in range(LLAMA.seq + 1)]
    (one,) = scored(run_of(), [text])
    logs = torch.log_softmax(whole_logits(LLAMA, text[:-1]), -1)
    assert one.logs == pytest.approx([logs[at, token].item() for at, token in enumerate(text[1:])], abs=1e-5)
