"""The help of commands: short, in groups or about a subject, wrapped once at the width of the terminal."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import raypar.cli.words
from raypar.cli.commands import COMMANDS
from raypar.cli.train.train import TrainArgs
from raypar.cli.words.columns import fitted
from raypar.cli.words.flag_fields import FlagField, blank
from raypar.cli.words.help_text import OWN, Help
from raypar.cli.words.run_args import RunArgs
from tests.support.completed_flags import fields_of_every_part

TABLE = tomllib.loads((Path(raypar.cli.words.__file__).with_name("groups.toml")).read_text())
HELP_WORDS = {"ckpt": ("ckpt", "export", "--help"), "data": ("data", "--help")}


@pytest.fixture
def at_width(said, monkeypatch):
    """Run a command line in a terminal of so many columns; returns what it printed."""

    def run(width, *words):
        monkeypatch.setenv("COLUMNS", str(width))
        code, out, err = said(*words)
        assert (code, err) == (0, "")
        return out

    return run


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    "words",
    [("--help",), ("train", "--help"), ("train", "--help", "all"), ("generate", "--help", "all"), ("draw", "-h")],
)
def test_lines_are_wrapped_once_at_the_width_of_the_terminal(at_width, width, words):
    lines = at_width(width, *words).splitlines()
    text = " ".join(at_width(120, *words).split())
    whole = " ".join(" ".join(lines).split())
    assert whole == text, "no word is broken or lost"
    for line in lines:
        assert len(line) <= width or " " not in line.strip() or "|" in line, line
    pairs = zip(lines, [*lines[1:], ""], strict=True)
    later = re.compile(r" {6,}(\d+ [KMG]?i?B\b|\S+)")  # how a line goes on
    short = [
        line
        for line, after in pairs
        if later.match(line) and (found := later.match(after))
        if len(line) + 1 + len(found[1]) <= width
    ]
    assert not short, "a paragraph fills its lines"


def test_a_narrow_terminal_breaks_no_word(at_width):
    assert "--micro-batch-size" in at_width(20, "train", "--help", "all")
    assert max(map(len, fitted("a  " + "b " * 300, 20).split("\n"))) <= 20


def test_help_has_the_flags_that_most_people_use_and_all_of_them_in_groups(at_width):
    short, every = at_width(100, "train", "--help"), at_width(100, "train", "--help", "all")
    flags = re.findall(r"^  (--\S+)", short, re.MULTILINE)
    assert len(short.splitlines()) < 50 and 12 <= len(flags) <= 18
    assert f"{len(flags)} of " in short and "raypar train --help all" in short
    titles = re.findall(r"^(\S.*):$", every, re.MULTILINE)
    assert titles[0] == OWN and titles[1:] == [title for title in TABLE["groups"] if title in titles]
    own = every.partition(f"{OWN}:\n")[2].partition("\n\n")[0]
    assert "--dry-run" in own and "--trace" in own and "--steps" not in own


def test_every_flag_of_a_run_is_in_a_group_and_every_pattern_is_of_use():
    help_of = Help("train", "", TrainArgs, blank(TrainArgs), is_run=True)
    fields = fields_of_every_part(RunArgs)
    assert help_of.groups(fields)[OWN] == [], "groups.toml lacks these"
    every = {one.path for one in fields_of_every_part(TrainArgs)}
    for patterns in TABLE["groups"].values():
        for pattern in patterns:
            assert any(re.fullmatch(pattern.replace(".", r"\.").replace("*", ".*"), path) for path in every), pattern
    assert len(set(TABLE["usual"])) == len(TABLE["usual"])


@pytest.mark.parametrize("name", [name for name in COMMANDS if COMMANDS[name].arguments])
def test_every_flag_of_every_command_says_what_it_does(at_width, name):
    out = at_width(80, *HELP_WORDS.get(name, (name, "--help")), "all")
    assert out.startswith(f"usage: raypar {name}")
    assert not re.search(r"^  --\S+$\n  --", out, re.MULTILINE), "a flag without a text"


def test_help_is_about_a_subject_and_of_the_recipe_that_is_named(at_width):
    about = at_width(100, "train", "--help", "zero")
    assert "--zero-gather" in about and "--offload" in about and "--steps" not in about
    assert "--model.moe.experts" in at_width(100, "train", "--help", "experts", "moe-tiny")
    assert "(default: 0.003)" in at_width(100, "train", "--mesh.pp", "2", "gpt-tiny", "--help")
    assert "--model.kind gpt|llama" in at_width(100, "train", "--help", "kind")


def test_a_misspelled_subject_of_help_is_guessed_from_all_words_of_help(said):
    assert "no step was taken" not in said("train", "--help", "chekpoint")[2]
    assert "is named 'chekpoint': did you mean 'checkpoint'?" in " ".join(
        said("train", "--help", "chekpoint")[2].split()
    )
    assert said("train", "--help", "checkpoint")[0] == 0


def test_help_spells_none_as_a_command_line_does():
    every = [one for kind in (TrainArgs, RunArgs) for one in fields_of_every_part(kind)]
    about = {one.path: one.about for one in every}
    assert "none: 1, but 0 with a parameter_server" in about["zero"] and about["keep_last"].endswith("none keeps all")
    assert not [path for path, text in about.items() if re.search(r"\bNone\b", text)]


@pytest.mark.parametrize("name", [name for name in COMMANDS if COMMANDS[name].arguments])
def test_help_about_nothing_that_it_knows_says_what_it_knows(said, name):
    words = *HELP_WORDS.get(name, (name, "--help")), "zzz"
    code, out, err = said(*words)
    assert (code, out) == (2, "")
    flat = " ".join(err.split())
    assert "--help: no flag and no group of flags is named 'zzz': give all, " in flat, flat
    known = flat.partition("give all, ")[2].partition(", or a part of")[0].split(", ")
    assert all(said(*words[:-1], subject)[0] == 0 for subject in known[:2])


def test_help_about_a_word_that_is_nearly_one_says_which(said):
    code, _, err = said("train", "--help", "stpes")
    assert code == 2 and "did you mean 'steps'?" in " ".join(err.split()), err


def test_help_of_all_flags_names_other_commands_for_other_parts(said):
    ends = {
        name: " ".join(said(name, "--help", "all")[1].split()).partition("Flags of other parts: ")[2]
        for name in ("train", "sft")
    }
    assert "raypar sft --help all, fine-tuning" in ends["train"]
    assert "raypar sft" not in ends["sft"] and "raypar train moe-small --help all, experts" in ends["sft"]


@pytest.mark.parametrize("words", [("--help", "--mesh.pp", "2"), ("--help", "gpt-tiny"), ("gpt-tiny", "-h")])
def test_words_of_the_command_after_help_are_no_subjects(said, words):
    assert said("train", *words)[0] == 0


def test_values_and_switches_are_spelled_as_they_are_typed():
    found = {one.path: one for one in fields_of_every_part(TrainArgs)}
    assert found["zero"].value == "0|1|2|3|none" and found["zero"].choices == ["0", "1", "2", "3", "none"]
    assert (found["steps"].value, found["steps"].choices) == ("N", [])
    assert (found["compile"].value, found["compile"].off) == ("true|false|graphs", "--no-compile")
    assert (found["sequence_parallel"].value, found["sequence_parallel"].off) == ("", "--no-sequence-parallel")
    assert found["dry_run"].off == "", "which has none"
    assert found["optim.kind"].choices == ["adamw", "sgd", "muon"]
    assert found["model.lora"].choices == ["none"]
    assert found["optim.rates"].value == "NAME X ..."
    assert FlagField("x", TrainArgs, tuple[int, ...] | None, None).value == "N ...|none"


def test_control_characters_of_a_default_are_spelled(said, tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('recipe = "gpt-tiny"\n[data]\npath = "\\u001b[31mred"\n')
    code, out, _ = said("train", file, "--help")
    assert code == 0 and "\x1b" not in out and r"\x1b[31mred" in out


def test_a_word_of_no_name_finds_the_flags_whose_text_has_it(at_width):
    out = at_width(80, "train", "--help", "checkpoint")
    assert "--save-every" in out and "--resume" in out and "--optim.lr" not in out
