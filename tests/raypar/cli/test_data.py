"""``raypar data show``: decoded sequences with what is learned in colour."""

from __future__ import annotations

import pytest

import raypar as rp
from raypar.cli.data import show
from raypar.config.toml import plain_of, toml_of
from raypar.paths import RUN
from tests.support.examples import TALK, made_jsonl, made_tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

LEARNED = "«fine, and you<|im_end|>»\n<|im_start|>user\nfine<|im_end|>\n<|im_start|>assistant\n«good<|im_end|>»"


@pytest.fixture
def talks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return str(made_jsonl(tmp_path / "talks.jsonl", [{"messages": TALK}] * 4))


def test_what_is_learned_is_marked(said, talks, tmp_path):
    folder = str(made_tokenizer(tmp_path / "tokenizer"))
    words = ("data", "show", talks, "--tokenizer", folder, "--seq", 256, "--number", 1)
    code, out, err = said(*words)
    assert code == 0, err
    counts, what = "1 sequence for training, 1 for validation (--validation)\n\n", "sequence 0: 3 pieces of examples, "
    assert out.startswith(counts + what) and out.count(LEARNED) == 3
    coloured = show([*map(str, words[1:])], terminal=True)
    assert "\x1b[38;5;29mgood<|im_end|>\x1b[0m" in coloured and "«" not in coloured
    assert "«<|im_start|>user" not in out
    _, everything, _ = said(*words, "--learn", "all", "--no-packing", "--validation")
    assert everything.startswith("1 sequence for validation, 3 for training\n\nsequence 0: 1 piece of examples")
    _, again, _ = said(*words, "--no-packing", "--number", 5)
    assert again.startswith(
        "3 sequences for training, 1 for validation (--validation); from sequence 3 on they come again"
    )
    assert "how are you<|im_end|>\n<|im_start|>assistant\nfine, and you<|im_end|>\n" in everything.partition("«")[2]


def test_of_a_run_its_own_sequences_are_shown_and_nothing_moves_the_cursor(said, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = str(made_jsonl(tmp_path / "texts.jsonl", [{"text": "a\x1b[2Jb\tc"}] * 5))
    run = rp.Run(model=rp.Llama(layers=2, hidden=16, heads=4, seq=16, vocab=256), data=rp.Examples(texts))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RUN).write_text(toml_of(plain_of(run)))
    code, out, err = said("data", "show", tmp_path / "run", "--number", 1)
    assert code == 0, err
    counts, what = "2 sequences for training, 1 for validation (--validation)", "2 pieces of examples, 14 of 16 tokens"
    assert out == f"{counts}\n\nsequence 0: {what}, 14 learned\n" + 2 * "- a«\\x1b[2Jb\\tc»\n"


def test_of_one_example_others_are_named_for_validation(said, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one, other = (str(made_jsonl(tmp_path / f"{name}.jsonl", [{"text": name}])) for name in ("one", "other"))
    code, _, err = said("data", "show", one)
    assert code == 2 and "it has 1 example, and needs two, one for validation: give more, or val_path" in err
    code, out, err = said("data", "show", one, "--val-path", other)
    assert code == 0, err
    assert out.startswith("1 sequence for training, ")


def test_of_a_template_that_ends_no_answer_a_warning_says_so(said, talks, tmp_path):
    open_ended = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    folder = str(made_tokenizer(tmp_path / "tokenizer", open_ended))
    code, _, err = said("data", "show", talks, "--tokenizer", folder)
    assert code == 0 and "ends an answer by what follows it" in err
    words = "train", "llama-tiny", "--data.kind", "examples", "--data.path", talks, "--data.tokenizer", folder
    code, _, err = said(*words, "--model.vocab", 300, "--dry-run")
    assert code == 0 and "ends an answer by what follows it" in err, err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "a command is missing: raypar data show EXAMPLES|RUN"),
        (("shows",), "there is no command 'shows': raypar data show EXAMPLES|RUN"),
        (("show",), "the examples are missing: raypar data show EXAMPLES|RUN"),
        (("show", "gone.jsonl"), "data.path: 'gone.jsonl' cannot be read (there is no such file or folder)"),
        (("show", "a.jsonl", "b.jsonl"), "'a.jsonl' has the weight 'b.jsonl', and it must be a number above 0"),
        (("show", "a.jsonl", "1", "a.jsonl", "2"), "'a.jsonl' is named twice: give it one weight"),
        (("show", "a.jsonl", "--seq", "0"), "--seq is 0: it must be at least 1"),
    ],
)
def test_mistakes_are_told(said, words, says):
    code, out, err = said("data", *words)
    assert (code, out) == (2, "") and says in err
