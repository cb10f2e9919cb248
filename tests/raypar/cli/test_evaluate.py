"""raypar eval: what it refuses before actors start, and that it tells what job.evaluate() returns."""

from __future__ import annotations

from dataclasses import replace

import pytest

import raypar as rp
from raypar.cli.text.evaluate import EvalArgs, evaluated

MODEL = rp.GPT(layers=2, hidden=32, heads=4, seq=64)
RUN = rp.Run(model=MODEL, microbatches=1, micro_batch_size=2, steps=2, seed=1)


@pytest.fixture(scope="module")
def given(job_of, tmp_path_factory):
    """A checkpoint of weights that no step has changed, a file, and evaluations of the run's data and of the file."""
    home = tmp_path_factory.mktemp("given")
    (home / "a.txt").write_text("some lines of a text that is long enough, with a 東. " * 99)
    job = job_of(RUN)
    saved, own = job.save(home / "saved"), job.evaluate(3)
    job.reset(replace(RUN, data=rp.Text(str(home / "a.txt"), val_path=str(home / "a.txt"))), resume=saved)
    return saved, home / "a.txt", own, job.evaluate(3)


@pytest.mark.long
def test_it_tells_what_an_evaluation_returns_on_any_mesh(given, said, kept_actors):
    saved, file, own, of_file = given
    for words, wanted in (((), own), ((file,), of_file)):
        code, out, err = said("eval", saved, *words, "--steps", 3, "--mesh.pp", 1)
        assert code == 0, err
        rows = dict(line.split(":", 1) for line in out.splitlines())
        found = {name: value.strip() for name, value in rows.items()}
        assert found["loss"] == f"{wanted.loss:.4f} nats a token" and found["tokens"] == f"{wanted.tokens:,}"
        assert found["bits per byte"] == f"{wanted.bits_per_byte:.4f}"
        assert wanted.num_bytes == wanted.tokens, "a byte is a token"


def test_all_mistakes_are_told_before_actors_start(given, said, tmp_path):
    saved, *_ = given
    code, _, err = said("eval", "--steps", "0", "--mesh.cpp", "2")
    assert code == 2
    for text in (
        "0 words are given: raypar eval RUN|FOLDER [DATA]",
        "--steps is 0: it must be at least 1",
        "--mesh.cpp",
    ):
        assert text in err
    code, _, err = said("eval", saved, "--ema")
    assert (code, "has no averages of its weights: leave ema out" in err) == (2, True)
    code, _, err = said("eval", saved, tmp_path / "no.txt")
    assert (code, err.count("no.txt"), "data." in err) == (2, 1, False)


def test_the_data_are_of_the_kind_of_the_file_or_of_the_run(given, tmp_path):
    saved, file, *_ = given
    run, _ = evaluated(EvalArgs((str(saved), "x.jsonl"), steps=5))
    assert run.data == rp.Examples("x.jsonl", None, val_path="x.jsonl") and run.eval_steps == 5
    run, found = evaluated(EvalArgs((str(saved), str(file))))
    assert run.data == rp.Text(str(file), val_path=str(file)) and found.path == saved
