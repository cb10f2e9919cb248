"""``raypar sft``: from a folder of Hugging Face and a file of examples to a folder of Hugging Face."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import raypar as rp
from raypar.checkpoint.find import VerifiedCheckpoint
from raypar.checkpoint.hugging_face import export
from raypar.cli.train.finetune import WORDING, sft
from raypar.cli.train.train import TrainArgs
from raypar.cli.words.help_text import HelpAsked
from raypar.config.finetuning import finetuning, lasting
from raypar.planner.sizes.parameters import num_parameters
from tests.support.completed_flags import fields_of_every_part
from tests.support.examples import CHATML, TALK, made_jsonl, made_tokenizer
from tests.support.hugging_face import checkpoint_of
from tests.support.team import Team

IDS = torch.zeros(1, 4, dtype=torch.int64)
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


@pytest.fixture
def folder(tmp_path):
    """A tiny model with a tokenizer."""
    model = rp.Llama(layers=2, hidden=16, heads=4, seq=64, vocab=260)
    team = Team.of(rp.Run(model=model, data=rp.Batches(lambda *_: (IDS, IDS)), timeout=20.0))
    found: VerifiedCheckpoint = checkpoint_of(team, tmp_path / "checkpoints")
    return made_tokenizer(export(found, tmp_path / "model"))


def test_a_model_learns_from_examples_and_goes_home(said, kept_actors, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made_jsonl(tmp_path / "talks.jsonl", [{"messages": TALK}] * 20)
    words = ("sft", "talks.jsonl", "--model", "model", "--mesh.pp", "2", "--steps", "2", "--microbatches", "2")
    code, out, _ = said(*words, "--dry-run")
    assert code == 0 and "18 pieces of examples" in out
    frozen = num_parameters(rp.Llama(layers=2, hidden=16, heads=4, seq=64, vocab=260))
    assert f"{frozen:,} frozen; a stage has " in out, "the model's, not the adapters'"
    code, out, err = said(*words, "--folder", "run", "--model.seq", "128", "--model.lora.rank", "2")
    assert code == 0, err
    code, out, err = said("ckpt", "export", "run", "home")
    assert code == 0, err
    files = {one.name for one in (tmp_path / "home").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= files
    code, out, err = said("train", "--resume", "run", "--steps", "3")
    assert code == 0, err
    (tmp_path / "model").rename(tmp_path / "moved")
    code, out, err = said("train", "--resume", "run", "--steps", "4", "--dry-run")
    assert code == 2 and "model.hf '" in err
    code, out, err = said("train", "--resume", "run", "--steps", "4", "--model.hf", "moved", "--dry-run")
    assert code == 0, err


def test_all_weights_learn_if_there_are_no_adapters(said, folder, tmp_path):
    path = str(made_jsonl(tmp_path / "talks.jsonl", [{"messages": TALK}] * 50))
    run, full = finetuning(path, str(folder)), finetuning(path, str(folder), adapters=False)
    assert (run.model.lora, full.model.lora) == (rp.Lora(), None)
    assert run.optim.lr > full.optim.lr
    assert run.data.tokenizer == str(folder)
    code, out, _ = said("sft", path, "--model", folder, "--model.lora", "none", "--dry-run")
    assert code == 0 and "optimizer" in out


def test_the_fix_for_a_model_over_bytes_is_one(said, tmp_path):
    """Its export has no tokenizer."""
    model = rp.Llama(layers=2, hidden=16, heads=4, seq=64, vocab=256)
    team = Team.of(rp.Run(model=model, data=rp.Batches(lambda *_: (IDS, IDS)), timeout=20.0))
    folder = export(checkpoint_of(team, tmp_path / "checkpoints"), tmp_path / "bytes")
    path = str(made_jsonl(tmp_path / "talks.jsonl", [{"messages": TALK}] * 20))
    words = ("sft", path, "--model", folder, "--dry-run")
    code, _, err = said(*words)
    fix = "for a model of bytes set data.tokenizer to none, and for conversations data.template to a file with a chat"
    assert code and err.endswith(f"or {fix} template\n"), err
    (tmp_path / "chatml.jinja").write_text(CHATML)
    words = (*words, "--data.template", tmp_path / "chatml.jinja")
    code, _, err = said(*words)
    assert code and err.endswith("or for a model of bytes set data.tokenizer to none\n"), err
    code, out, err = said(*words, "--data.tokenizer", "none")
    assert code == 0 and "pieces of examples" in out, err


def test_without_a_template_both_ways_out_are_said_once(said, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = folder / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("chat_template", "other"))
    path = str(made_jsonl(tmp_path / "talks.jsonl", [{"messages": TALK}] * 20))
    code, _, err = said("sft", path, "--model", folder, "--dry-run")
    assert code == 2 and "a folder that has one, or data.template a file with one (--data.template FILE)" in err
    assert err.count("converting path") == 1, err
    (tmp_path / "chatml.jinja").write_text(CHATML)
    code, _, err = said("sft", path, "--model", folder, "--dry-run", "--data.template", tmp_path / "chatml.jinja")
    assert code == 0, err


def test_the_guide_says_how_often_a_run_validates(folder, tmp_path):
    run = finetuning(str(made_jsonl(tmp_path / "talks.jsonl", [{"messages": TALK}] * 20)), str(folder))
    guide = Path(__file__).parents[3] / "docs" / "finetune.md"
    figures = re.findall(r"(\d+) times in (\d+) steps", guide.read_text())
    assert figures
    for times, steps in figures:
        every = lasting(run, int(steps)).eval_every
        assert len(range(every, int(steps), every)) + 1 == int(times), steps


@pytest.mark.long
def test_a_run_passes_three_times_over_the_examples_whatever_the_flags(said, folder, tmp_path):
    path = str(made_jsonl(tmp_path / "talks.jsonl", [{"messages": TALK}] * 50))
    other = str(made_jsonl(tmp_path / "texts.jsonl", [{"text": "abc"}] * 50))
    run = finetuning(path, str(folder))
    assert lasting(run, 40).eval_every == 8 and lasting(run, 40).optim.warmup == 2
    for words in ((), ("--microbatches", "2"), ("--model.seq", "256", "--mesh.dp", "2"), (1, other, 0.5)):
        code, out, err = said("sft", path, *words, "--model", folder, "--dry-run")
        assert code == 0, err
        passes = [float(part.split()[0]) for part in out.split("the run makes ")[1:]]
        assert len(passes) == (2 if other in words else 1) and max(passes) >= 3
    assert "0.667 of the sequences from" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            (),
            "raypar: 2 mistakes, no step was taken:\n- the examples are missing: raypar sft EXAMPLES --model FOLDER\n",
        ),
        (("x.jsonl",), "--model is missing, the folder of a model of Hugging Face"),
        (("x.jsonl", "--model", "gone"), "model.hf 'gone': '"),
        (("x.jsonl", "--model", "gone"), "2 mistakes, no step was taken:\n- data.path: 'x.jsonl' cannot be read"),
        (
            ("x.jsonl", "--model", "a/b"),
            "whole; if a/b is a model of huggingface.co, hf download a/b --local-dir b fetch",
        ),
        (
            ("x.jsonl", "--model", "run"),
            "model.hf 'run': it is a folder of a run: raypar ckpt export run my-model write",
        ),
        (
            ("x.jsonl", "--model", "run/checkpoints/step-00000004"),
            "raypar ckpt export run/checkpoints/step-00000004 my-",
        ),
        (("x.jsonl", "--stepps", "3"), "2 mistakes, no step was taken:\n- --model is missing"),
        (("x.jsonl", "--stepps", "3"), "\n- --stepps is no flag: did you mean --steps?"),
        (("x.jsonl", "--modle", "smol"), "\n- --modle is no flag: did you mean --model?"),
        (("x.jsonl", "--model", "gone", "--mesh.pq", "2"), "\n- --mesh.pq is no flag: did you mean --mesh.pp?"),
        (("gpt-tiny", "run/run.toml", "--model", "gone"), "'gpt-tiny' is no file of examples: give these alone, or"),
        (("x.jsonl", "--resume", "run"), "go on with one by raypar train --resume RUN"),
    ],
)
def test_mistakes_are_told(said, words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints" / "step-00000004").mkdir(parents=True)
    (tmp_path / "run" / "run.toml").touch()
    code, out, err = said("sft", *words)
    assert (code, out) == (2, "") and says in err


@pytest.mark.parametrize("words", [("my model", "talks.jsonl"), ("talks.jsonl", "my model"), ("my model",)])
def test_a_model_without_its_flag_is_the_only_mistake(said, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model").mkdir()
    (tmp_path / "my model" / "config.json").write_text("{}")
    code, _, err = said("sft", *words, "--stepz", 3)
    fix = f"raypar sft {'talks.jsonl' if len(words) > 1 else 'EXAMPLES'} --model 'my model'"
    fault = f"--model is missing before 'my model', the folder of a model of Hugging Face: {fix}"
    assert (code, err) == (2, f"raypar: a mistake, no step was taken:\n{fault}\n")


def test_a_word_among_the_flags_is_a_mistake(said, folder, tmp_path):
    path = str(made_jsonl(tmp_path / "talks.jsonl", [{"messages": TALK}] * 20))
    for word in ("gpt-small", "more.jsonl"):
        code, out, err = said("sft", path, "--model", folder, "--steps", 2, word, "--dry-run")
        assert (code, out) == (2, "") and f"{word!r} is a word too many" in err, err


@pytest.mark.parametrize("words", [("--help",), ("talks.jsonl", "--help"), ("a", "1", "--model", "gone", "-h")])
def test_help_is_that_of_the_command_whatever_is_missing(words):
    with pytest.raises(HelpAsked) as asked:
        sft(words, terminal=False)
    said = str(asked.value)
    assert said.startswith("usage: raypar sft EXAMPLES --model FOLDER [flags]\n")
    assert "--microbatches" in said and "RECIPE" not in said and "--resume" not in said
    assert not {"the recipe", "talks.jsonl."} & {*said.split("\n")} and "defaults below" not in said


def test_its_help_says_what_follows_from_the_folder_and_the_examples(said):
    out = " ".join(said("sft", "--help", "all")[1].split())
    for flag, default in {
        "--steps": "those of 3 passes over the examples",
        "--eval-every": "1 / 5 of the steps",
        "--model.seq": "that of FOLDER, at most 512",
        "--model.layers": "that of FOLDER",
        "--optim.lr": "0.0002; 2e-05 with --model.lora none",
    }.items():
        assert out.partition(f" {flag} ")[2].partition("(default: ")[2].startswith(f"{default})"), flag
    fields = {one.path for one in fields_of_every_part(TrainArgs)}
    assert {*WORDING.defaults, *WORDING.without} <= fields


@pytest.mark.parametrize("flag", ["--model.lora.rank", "--model.lora.targets", "--data.template", "--data.learn"])
def test_its_help_has_the_flags_of_fine_tuning(said, flag):
    code, out, _ = said("sft", "--help", "all")
    assert code == 0 and flag in out
    assert "2e-04" in out or "0.0002" in out, "the rate of adapters"
