"""What lm-eval asks of a model is answered by the actors; its base class is a stand-in where it is not installed."""

from __future__ import annotations

import sys
from contextlib import closing
from types import ModuleType, SimpleNamespace

import pytest
import torch

import raypar as rp
from raypar.actors.specs.sampling import Sampling
from raypar.job.lm_eval import HarnessModel, lm_eval_model
from raypar.job.text.scoring import scores
from tests.raypar.job.test_generation import LLAMA, run_of, whole_logits
from tests.support.generation import TeamGeneration


def encoded(text):
    return [ord(letter) - 64 for letter in text]


def request(*args):
    return SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def asked():
    """A model's answers, on two pipeline ranks; letters are its tokens."""
    with closing(TeamGeneration(run_of(mesh=rp.Mesh(pp=2)))) as team:

        def generate(prompts, most, *, temperature, top_p, stop):
            assert (temperature, top_p, stop) == (0.0, 1.0, ["Z", 7])
            made = team.start(prompts, most, Sampling(), ()).run()
            return [SimpleNamespace(text="".join(chr(64 + token) for token in one.tokens)) for one in made]

        def score(texts):
            return scores(lambda: team.loaded, lambda call: call(), texts, 2)

        yield HarnessModel(score, generate, encoded, 6, 1, [7])


def logs_of(ids):
    return torch.log_softmax(whole_logits(LLAMA, ids), -1)


def total(ids, count):
    logs = logs_of(ids)
    return sum(logs[at - 1, ids[at]].item() for at in range(len(ids) - count, len(ids)))


def test_likelihoods_are_of_the_continuation_alone(asked):
    long = "ABCDEFG"
    found = asked.loglikelihood([request("ABC", "DE"), request("", "CD"), request("AB", ""), request(long, "H")])
    wanted = [total(encoded("ABCDE"), 2), total([1, *encoded("CD")], 2), 0.0, total(encoded("BCDEFGH"), 1)]
    assert [value for value, _ in found] == pytest.approx(wanted, abs=1e-5)
    ids = encoded("ABC")
    likeliest = logs_of(ids)[-1].argmax().item()
    asked_again = asked.loglikelihood([request("ABC", chr(64 + likeliest)), request("ABC", chr(64 + likeliest - 1))])
    assert [is_greedy for _, is_greedy in asked_again] == [True, False]
    with pytest.raises(rp.ConfigError, match="continuation of more than 6 tokens"):
        asked.loglikelihood([request("A", "BCDEFGH")])


def test_rolling_likelihoods_count_every_token_once(asked):
    text = "ABCDEFGHIJKLM"
    ids = [1, *encoded(text)]
    wanted = total(ids[:7], 6) + total(ids[6:13], 6) + total(ids[7:14], 1)  # the last one behind all that fit
    assert asked.loglikelihood_rolling([request(text), request("")]) == pytest.approx([wanted, 0.0], abs=1e-4)


def test_answers_are_greedy_unless_they_are_to_be_sampled(asked):
    (made,) = asked.generate_until([request("ABC", {"until": ["Z"], "max_gen_toks": 3, "temperature": 0.7})])
    ids = encoded("ABC")
    for _ in range(3):
        ids.append(logs_of(ids)[-1].argmax().item())
    assert encoded(made) == ids[3:]


def test_a_job_is_a_model_of_theirs(monkeypatch):
    class LM:
        pass

    job = SimpleNamespace(run=rp.Run(model=LLAMA, data=rp.Text("stdlib")), score=lambda texts: [], generate=None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(rp.ConfigError, match=r"no tokenizer|pip install 'raypar\[lm-eval\]'"):
        lm_eval_model(job)
    module = ModuleType("lm_eval.api.model")
    module.LM = LM
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", module)
    job.run = rp.Run(model=rp.Llama(vocab=256), data=rp.Text("stdlib"))
    made = lm_eval_model(job)
    assert isinstance(made, LM)
    assert made.loglikelihood([]) == []
