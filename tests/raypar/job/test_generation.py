"""Generation: the same tokens and logits on every mesh as by whole forwards of one plain model."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import raypar as rp
from raypar.actors.errors import ActionError
from raypar.actors.specs.sampling import Sampling
from raypar.actors.worker import generation as worker_generation
from raypar.config.conflicts.generation import prompt_faults
from raypar.errors import JobError
from raypar.job.text import generation as driver_generation
from raypar.job.text.generation import TextGeneration, request_of
from tests.support.generation import GPT, LLAMA, PROMPTS, TeamGeneration, plain_texts, run_of, team_texts, whole_logits
from tests.support.thinned import thinned

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


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Few prompts are cut into groups, as many would be."""
    monkeypatch.setattr(driver_generation, "_ENOUGH", 1)


@pytest.mark.parametrize(
    ("prompts", "dp", "groups"), [(1, 1, 1), (7, 1, 1), (16, 1, 2), (15, 1, 1), (90, 1, 3), (31, 2, 2)]
)
def test_few_prompts_stay_together(monkeypatch, prompts, dp, groups):
    monkeypatch.setattr(driver_generation, "_ENOUGH", 8)
    loaded = SimpleNamespace(schedule=SimpleNamespace(num_ranks=3), run=SimpleNamespace(mesh=rp.Mesh(dp=dp), model=GPT))
    assert driver_generation._num_groups(loaded, prompts) == groups


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", MESHES)
def test_tokens_are_the_same_on_every_mesh(mesh):
    with closing(TeamGeneration(run_of(**MESHES[mesh]))) as generation:
        for sampling in (Sampling(), SAMPLED):
            assert generation.tokens(PROMPTS, 6, sampling) == plain_texts(LLAMA, PROMPTS, 6, sampling)
        assert generation.tokens(PROMPTS[:1], 6) == plain_texts(LLAMA, PROMPTS[:1], 6), "fewer prompts than seats"


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", ["one", "pp2", "tp2", "pp2 tp2", "tp2 sequence", "dp2 zero3"])
def test_logits_are_those_of_whole_forwards(mesh, monkeypatch):
    """Every choice is made from the logits that a forward of the whole sequence gives, within 1e-5."""
    seen, lock, chosen = {}, threading.Lock(), worker_generation.choose

    def choose(logits, sampling, prompts, positions):
        with lock:
            for row, number, position in zip(logits, prompts, positions, strict=True):
                seen[number, position] = row.float().clone()
        return chosen(logits, sampling, prompts, positions)

    monkeypatch.setattr(worker_generation, "choose", choose)
    texts = [
        [*prompt, *new] for prompt, new in zip(PROMPTS, team_texts(run_of(**MESHES[mesh]), PROMPTS, 5), strict=True)
    ]
    for number, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        whole = whole_logits(LLAMA, text)
        for position in range(len(prompt), len(text)):
            torch.testing.assert_close(seen[number, position], whole[position - 1], rtol=0, atol=1e-5)


MODELS = {
    "learned": GPT,
    "hierarchical": rp.GPT(layers=2, hidden=32, heads=4, vocab=64, seq=32, positions="hierarchical"),
    "sinusoidal": rp.GPT(layers=2, hidden=32, heads=4, vocab=64, seq=32, positions="sinusoidal"),
    "alibi": rp.GPT(layers=2, hidden=32, heads=4, vocab=64, seq=32, positions="alibi", tied=True),
    "window": rp.Llama(layers=4, hidden=32, heads=4, kv_heads=1, ffn=48, vocab=64, seq=32, window=4, window_first=1),
    "gemma": rp.Llama(
        layers=2,
        hidden=32,
        heads=4,
        kv_heads=2,
        ffn=48,
        vocab=64,
        seq=32,
        gate="gelu_tanh",
        post_norms=True,
        scaled_embedding=True,
        query_scale=4.0,
        attention="materialised",
        attention_cap=2.0,
        logit_cap=3.0,
        window=4,
        window_skips=2,
    ),
    "qk norm": rp.Llama(layers=2, hidden=32, heads=4, head_width=16, ffn=48, vocab=64, seq=32, qk_norm=True),
    "experts": rp.Llama(layers=2, hidden=32, heads=4, ffn=48, vocab=64, seq=32, moe=rp.MoE(experts=4)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("model", thinned(MODELS, lambda model: model in ("learned", "gemma", "experts")))
def test_every_model_goes_on_as_whole_forwards_do(model):
    model = MODELS[model]
    for changes in ({}, {"mesh": rp.Mesh(pp=2, tp=2), "sequence_parallel": True}):
        assert team_texts(run_of(model, **changes), PROMPTS, 8) == plain_texts(model, PROMPTS, 8)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes",
    [{"mesh": rp.Mesh(tp=2)}, {"mesh": rp.Mesh(pp=2, tp=4)}, {"mesh": rp.Mesh(tp=2, dp=2), "sequence_parallel": True}],
)
def test_a_vocabulary_that_tensor_ranks_can_not_divide_equally_generates(changes):
    model = replace(LLAMA, vocab=67, kv_heads=4)
    assert team_texts(run_of(model, **changes), PROMPTS, 6) == plain_texts(model, PROMPTS, 6)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("changes", [{"mesh": rp.Mesh(dp=2, ep=2)}, {"mesh": rp.Mesh(tp=2, ep=2)}])
def test_divided_experts_generate(changes):
    model = MODELS["experts"]
    assert team_texts(run_of(model, **changes), PROMPTS, 6) == plain_texts(model, PROMPTS, 6)


def test_halves_are_kept_in_halves():
    whole, half = ({}, {"precision": rp.Precision(compute="bf16")})
    sizes = []
    for changes in (whole, half):
        with closing(TeamGeneration(run_of(mesh=rp.Mesh(pp=2), **changes))) as generation:
            assert [len(one) for one in generation.tokens(PROMPTS, 4)] == [4] * len(PROMPTS)
            sizes.append(planned(generation, PROMPTS, 4))
    assert sizes[0] == [2 * count for count in sizes[1]]


def planned(generation, prompts, count):
    return generation.start(prompts, count).cache_bytes(generation.loaded)


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", ["one", "pp2", "tp2", "pp2 tp2", "dp2"])
def test_the_memory_of_caches_is_as_planned_and_linear(mesh):
    with closing(TeamGeneration(run_of(**MESHES[mesh]))) as generation:
        seen, tables = [], []
        started = generation.start(PROMPTS, 6)

        def on(*_):
            seen.append([one.memory().get("cache", 0) for one in probes(generation)])
            tables.append(generation.memory())

        started.run(on)
        assert len({tuple(one) for one in seen}) == 1, "a cache does not grow while tokens come"
        assert all(one["cache"].formula == one["cache"].measured > 0 for table in tables for one in table.values())
        assert all("cache" not in one.memory() for one in probes(generation)), "it is dropped at the end"
        world = generation.team.world
        assert [planned(generation, PROMPTS, 6)[world.pp(rank)] for rank in world.replica(0)] == [
            seen[0][rank] for rank in world.replica(0)
        ]
        one, further = planned(generation, [[1, 2]] * 4, 3), planned(generation, [[1, 2]] * 8, 3)
        assert [2 * count for count in one] == further
        assert [2 * count for count in one] == planned(generation, [[1, 2]] * 4, 7), "4 positions and 8"


def probes(generation):
    return [actor.member.probe for actor in generation.team.workers]


def test_a_cache_is_two_times_layers_heads_width_positions_sequences_and_bytes():
    with closing(TeamGeneration(run_of(mesh=rp.Mesh(tp=2)))) as generation:
        assert planned(generation, [[1, 2, 3]] * 5, 6) == [2 * LLAMA.layers * (2 // 2) * 8 * (3 + 6 - 1) * 5 * 4]


def test_the_bytes_of_a_token_are_those_of_the_formula():
    """Each new token costs one message of a hidden vector between stages, and one id back, for each sequence."""
    with closing(TeamGeneration(run_of(mesh=rp.Mesh(pp=2)))) as generation:
        sent = []
        for count in (3, 7):
            before = [
                table.get(op, (0, 0))[1] for table in generation.team.ledger("pp") for op in ("send", "send tokens")
            ]
            generation.tokens(PROMPTS[:4], count)
            after = [
                table.get(op, (0, 0))[1] for table in generation.team.ledger("pp") for op in ("send", "send tokens")
            ]
            sent.append([now - then for now, then in zip(after, before, strict=True)])
        values, _, _, ids = ((more - few) / 4 / 4 for few, more in zip(*sent, strict=True))
        assert (values, ids) == (LLAMA.hidden * 4, 8), "4 sequences, 4 tokens more"


def test_logits_of_a_divided_vocabulary_are_gathered_once_a_token():
    with closing(TeamGeneration(run_of(mesh=rp.Mesh(tp=2)))) as generation:
        sent = []
        for count in (3, 7):
            before = generation.team.ledger("tp")[0].get("all_gather", (0, 0))
            generation.tokens(PROMPTS[:2], count)
            sent.append(
                [now - then for now, then in zip(generation.team.ledger("tp")[0]["all_gather"], before, strict=True)]
            )
        assert [more - few for few, more in zip(*sent, strict=True)] == [4, 4 * 2 * LLAMA.vocab // 2 * 4]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mesh": rp.Mesh(cp=2)}, "mesh.cp is 2"),
        ({"mesh": rp.Mesh(tp="2d:2x2")}, "mesh.tp is '2d:2x2'"),
        ({"model": rp.Llama(layers=2, hidden=32, heads=4, vocab=64, seq=32, moe=rp.MoE(capacity=1.25))}, "capacity is"),
    ],
)
def test_what_cannot_generate_is_refused(changes, says):
    with pytest.raises(rp.ConfigError, match=says):
        request_of(run_of(**changes), [[1]], 4, Sampling(), None)


def test_keys_are_not_kept_beyond_what_a_dynamic_scaling_leaves_as_it_is():
    model = rp.Llama(seq=64, rope_scaling=rp.RopeScaling("dynamic", factor=2.0, trained=32))
    assert list(prompt_faults(model, [[1] * 20], 12)) == []
    assert "longer than the 32 positions of the model" in next(prompt_faults(model, [[1] * 20], 13))


def test_all_wrong_prompts_are_told_at_once():
    with pytest.raises(rp.ConfigError) as told:
        request_of(run_of(), [[], [64], list(range(30)), list(range(40))], 4, Sampling(), None)
    assert told.value.faults == [
        "prompt 0 is empty: give it a token",
        "prompt 1 has the token 64: the model's ids are 0 to 63",
        "prompt 2 has 30 tokens, and with 4 more it is longer than the 32 positions of the model: "
        "set max_new_tokens to 2 at most",
        "prompt 3 has 40 tokens, and the model has 32 positions: shorten it to 31 at most",
    ]
    with pytest.raises(rp.ConfigError, match="the run has no tokenizer for texts"):
        request_of(run_of(), ["text"], 4, Sampling(), None)


def test_caches_that_do_not_fit_are_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr("raypar.job.text.generation.free_memory", lambda: 10_000)
    with (
        closing(TeamGeneration(run_of())) as generation,
        pytest.raises(rp.ConfigError, match="the keys and values of 5 prompts take 30 KiB, and 10 KiB are free here"),
    ):
        generation.start(PROMPTS, 6)


def test_a_stop_ends_a_text_and_is_not_part_of_it():
    with closing(TeamGeneration(run_of(mesh=rp.Mesh(pp=2)))) as generation:
        whole = generation.tokens(PROMPTS, 6)
        found = generation.start(PROMPTS, 6, stop=[whole[0][2]]).run()
    first = whole[0].index(whole[0][2])
    assert found[0].tokens == whole[0][:first]
    assert found[0].is_stopped
    for text, one in zip(whole, found, strict=True):
        assert one.tokens == (text[: text.index(whole[0][2])] if whole[0][2] in text else text)


def test_an_error_names_the_actor_and_the_action(monkeypatch):
    def fail(*_):
        raise RuntimeError("no more tokens")

    monkeypatch.setattr(worker_generation, "choose", fail)
    with (
        closing(TeamGeneration(run_of(mesh=rp.Mesh(pp=2), timeout=3.0))) as generation,
        pytest.raises(ActionError, match=r"actor pp=1: action 1F0 failed: RuntimeError: no more tokens"),
    ):
        generation.loaded.calls.gather = lambda refs, what, ranks: [ref.result(9) for ref in reversed(refs)]
        generation.tokens(PROMPTS, 3)


def pressed(number, token, text):
    raise KeyboardInterrupt


def test_a_job_generates_text(job_of):
    """On real actors: text in and out, streamed, and the tokens of the plain model; then training goes on."""
    model = rp.GPT(layers=2, hidden=32, heads=4, seq=64)
    job = job_of(rp.Run(model=model, mesh=rp.Mesh(pp=2, tp=2), microbatches=2, micro_batch_size=1, steps=2, seed=1))
    told, prompts = [], ["def f(", "import "]
    found = job.generate(prompts, 5, on=lambda *one: told.append(one))
    ids = [list(prompt.encode()) for prompt in prompts]
    assert [one.tokens for one in found] == plain_texts(model, ids, 5, seed=1)
    for number, one in enumerate(found):
        assert one.text == bytes(one.tokens).decode(errors="replace").rstrip("\ufffd")
        assert "".join(text for prompt, _, text in told if prompt == number) == one.text
    assert job.generate("def f(", 5)[0] == found[0]
    with pytest.raises(JobError, match="this job is generating text"):
        job.generate(prompts, 5, on=lambda *_: job.generate(prompts, 5))
    with pytest.raises(KeyboardInterrupt):
        job.generate(prompts, 20, on=pressed)
    assert job.generate(prompts, 5) == found, "Ctrl-C leaves nothing behind"
    with pytest.raises(rp.ConfigError, match="generate: temperature"):
        job.generate(prompts, temperature=-1.0)
    assert job.step().steps_taken == 1


def test_after_a_failure_it_goes_on_with_what_there_is():
    with closing(TeamGeneration(run_of())) as generation:
        wanted, failed = generation.tokens(PROMPTS, 6, SAMPLED), []

        def read(call):
            """As a job does that survives a failure: call again."""
            try:
                return call()
            except JobError:
                return call()

        gather = generation.loaded.calls.gather

        def fail_once(refs, what, ranks):
            if what == "token 4" and not failed:
                failed.append(what)
                raise JobError("an actor died")
            return gather(refs, what, ranks)

        generation.loaded.calls.gather = fail_once
        request = request_of(generation.loaded.run, PROMPTS, 6, SAMPLED, None)
        told = []
        found = TextGeneration(request, lambda: generation.loaded, read).run(lambda *one: told.append(one))
    assert failed
    assert [one.tokens for one in found] == wanted
    assert len(told) == 6 * len(PROMPTS), "every token is told once"
