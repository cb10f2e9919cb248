"""raypar generate and chat: what they refuse before actors start, and what they print."""

from __future__ import annotations

import json
import logging

import pytest

import raypar as rp
from raypar.cli.commands import COMMANDS
from raypar.cli.main import _messages
from raypar.cli.text.generate import ChatArgs, chat, generate, run_on
from tests.support.generation import plain_texts

MODEL = rp.GPT(layers=2, hidden=32, heads=4, seq=64)
RUN = rp.Run(model=MODEL, microbatches=1, micro_batch_size=1, steps=2, seed=1)


@pytest.fixture(scope="module")
def saved(job_of, tmp_path_factory):
    """A checkpoint of weights that no step has changed."""
    return job_of(RUN).save(tmp_path_factory.mktemp("saved"))


def test_all_mistakes_are_told_before_actors_start(said, saved):
    code, out, err = said("generate", saved, "--temperature", "-1", "--top-p", "2", "--top-k", "0", "--mesh.cpp", "2")
    assert (code, out) == (2, "")
    for text in (
        '1 word is given: raypar generate RUN|FOLDER "PROMPT" ...',
        "--temperature is -1: it must be at least 0",
        "--top-p is 2: it must be more than 0 and at most 1",
        "--top-k is 0: it must be at least 1",
        "--mesh.cpp is no flag: did you mean --mesh.cp?",
    ):
        assert text in err
    code, _, err = said("generate", saved, "import", "--max-new-tokens", "90", "--mesh.cp", "2")
    assert (code, "mesh.cp is 2, which divides sequences" in err) == (2, True)
    code, _, err = said("generate", saved, "import", "--max-new-tokens", "90")
    assert (code, "prompt 0 has 6 tokens, and with 90 more it is longer than the 64 positions" in err) == (2, True)
    code, _, err = said("generate", saved.parent / "no", "import")
    assert (code, "there is no folder" in err or "no" in err) == (2, True)


def test_a_checkpoint_goes_on_with_prompts_on_another_mesh(said, saved, kept_actors):
    prompts = ["def main(", "import "]
    code, out, err = said("generate", saved, *prompts, "--max-new-tokens", 5, "--mesh.pp", 2)
    assert code == 0, err
    made = [
        bytes(one).decode(errors="replace") for one in plain_texts(MODEL, [one.encode() for one in prompts], 5, seed=1)
    ]
    wanted = "".join(
        f"--- {i + 1} ---\n{prompt}{text}\n" for i, (prompt, text) in enumerate(zip(prompts, made, strict=True))
    )
    assert out.replace("\ufffd", "") == wanted.replace("\ufffd", "")


def test_json_has_each_prompt_with_its_text_and_tokens(saved, kept_actors, capsys):
    printed = list[str]()
    generate([str(saved), "ab", "--max-new-tokens", "3", "--json"], lambda text, end="\n": printed.append(text) or 0)
    (only,) = json.loads("".join(printed))
    (tokens,) = plain_texts(MODEL, [b"ab"], 3, seed=1)
    assert (only["prompt"], only["tokens"], only["is_stopped"]) == ("ab", list(tokens), False)
    assert only["text"].strip("\ufffd") == bytes(tokens).decode(errors="replace").strip("\ufffd")


def test_a_chat_goes_on_with_all_that_was_said(saved, kept_actors):
    typed, printed = iter(["ab", "cd"]), []

    def read():
        line = next(typed, None)
        if line is None:
            raise EOFError
        return line

    chat(
        [str(saved), "--temperature", "0", "--max-new-tokens", "3"],
        lambda text, end="\n": printed.append(text + end) or 0,
        read,
    )
    _, *answers = "".join(printed).split("> ")
    (first,) = plain_texts(MODEL, [b"ab"], 3, seed=1)
    assert answers[0].strip("\n\ufffd") == bytes(first).decode(errors="replace").strip("\n\ufffd")
    assert len(answers) == 3


def test_a_model_with_more_ids_than_bytes_needs_a_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr("raypar.cli.text.trained_model.HF", lambda path: rp.Llama(vocab=300))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(rp.ConfigError, match="has no tokenizer, and its model 300 token ids: give --tokenizer FILE"):
        run_on(str(tmp_path), ChatArgs(), tmp_path)


def test_training_prints_continuations_of_the_validation_text(said, kept_actors):
    code, _, err = said("train", "gpt-tiny", "--mesh.pp", 1, "--microbatches", 1, "--steps", 2, "--sample-every", 2)
    assert code == 0, err
    assert [line[:21] for line in err.splitlines() if line.startswith("sample")] == ["sample after step 2: "] * 2
    code, _, err = said("train", "gpt-tiny", "--sample-every", "-1", "--mesh.cp", 2)
    assert (code, "--sample-every is -1: it must be at least 0" in err) == (2, True)


def test_what_starts_is_said_where_the_log_has_errors_alone(capsys):
    lifecycle, other = (logging.getLogger(f"raypar.{name}") for name in ("cluster.lifecycle.ray_cluster", "job"))
    for announces in (True, False):
        with _messages(logging.ERROR, announces=announces):
            lifecycle.info("starting 1 actor")
            other.warning("of no interest")
    assert capsys.readouterr().err == "starting 1 actor\n"
    assert all(COMMANDS[name].announces for name in ("generate", "chat", "eval"))
