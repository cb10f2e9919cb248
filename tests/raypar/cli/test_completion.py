"""``raypar completion``: what the shells complete, tried in those that are here."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from raypar.cli.commands import COMMANDS
from raypar.cli.completion import TABLE, completed, completion
from raypar.errors import ConfigError
from raypar.planner.hardware.data_sheets import DEVICES
from raypar.schedules.catalog import CATALOG
from tests.support.completed_flags import table

ASKED = {
    "raypar tr": ["trace", "train"],
    "raypar ckpt ": ["export", "ls", "verify"],
    "raypar completion ": ["bash", "fish", "zsh"],
    "raypar train gpt-": ["gpt-124m", "gpt-small", "gpt-tiny"],
    "raypar train --mesh.p": ["--mesh.pp"],
    "raypar train moe-tiny --model.moe.top-k": ["--model.moe.top-k"],
    "raypar train --schedule zb-h": ["zb-h1", "zb-h2"],
    "raypar train --optim.kind ": ["adamw", "muon", "sgd"],
    "raypar draw interleaved-": sorted(name for name in CATALOG if name.startswith("interleaved-")),
    "raypar draw 1f1b --format ": ["csv", "json", "none", "svg", "text"],
    "raypar ckpt export --d": ["--dtype"],
    "raypar ckpt export --help ": ["adapter", "all", "dtype", "ema"],
    "raypar plan --gpu ": sorted(DEVICES),
    "raypar plan --between ib-": ["ib-hdr", "ib-ndr", "ib-xdr"],
    "raypar train --help e": ["evaluation", "experts"],
    "raypar plan -h al": ["all"],
    "raypar sft --resu": [],
    "raypar train --data.path no": ["novel.txt"],
    "raypar train job": ["job.toml"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a few files, and the scripts."""
    path = tmp_path_factory.mktemp("files")
    for name in ("novel.txt", "job.toml"):
        (path / name).touch()
    for shell in ("bash", "zsh", "fish"):
        (path / f"script.{shell}").write_text(completion([shell]))
    return path


def answers(command, folder):
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    return run.stdout.splitlines()


def test_bash_completes_commands_flags_words_and_files(folder):
    asks = "".join(f"ask {line}{chr(39) * 2 if line.endswith(' ') else ''}\n" for line in ASKED)
    ask = 'ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _raypar; echo "${COMPREPLY[*]}"; }'
    found = answers(["bash", "--norc", "-c", f"source script.bash\n{ask}\n{asks}"], folder)
    assert {line: sorted(words.split()) for line, words in zip(ASKED, found, strict=True)} == ASKED


def test_bash_completes_after_an_equals_sign_and_paths_with_blanks(folder):
    (folder / "two words").touch()
    asks = (
        "COMP_WORDS=(raypar train --zero = n); COMP_CWORD=4; _raypar; echo ${COMPREPLY[*]}; "
        "COMP_WORDS=(raypar report two); COMP_CWORD=2; _raypar; echo ${#COMPREPLY[@]} ${COMPREPLY[0]}"
    )
    assert answers(["bash", "--norc", "-c", f"source script.bash; {asks}"], folder) == ["none", "1 two words"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not here")
def test_fish_completes_the_same(folder):
    for line, words in ASKED.items():
        found = answers(["fish", "-N", "-c", f"source script.fish; complete -C '{line}'"], folder)
        assert sorted(one.partition("\t")[0] for one in found) == words, line


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not here")
def test_zsh_reads_its_script(folder):
    assert answers(["zsh", "-n", "script.zsh"], folder) == []


def test_the_file_of_flags_is_what_the_classes_say():
    assert TABLE.read_text() == table(), "run python -m tests.support.completed_flags"


def test_nothing_large_is_imported_for_a_script():
    code = """
import sys
from raypar.cli.main import run_command
assert run_command(["completion", "bash"]) == 0
large = {"torch", "ray", "numpy", "pydantic", "tyro", "rich"} & {*sys.modules}
assert not large, large
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_scripts_have_every_command_and_flag():
    flags = {(one.name, flag.name) for one in completed() for flag in one.flags}
    assert {("train", "--model.moe.experts"), ("sft", "--model"), ("plan", "--gpus"), ("data show", "--learn")} <= flags
    for shell in ("bash", "zsh", "fish"):
        text = completion([shell])
        assert all(name in text for name in COMMANDS)
        for _, flag in flags:
            assert flag.removeprefix("--") in text


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_its_help_says_how_each_shell_reads_the_script(said, flag):
    code, out, err = said("completion", flag)
    assert (code, err) == (0, "")
    assert out.startswith("usage: raypar completion bash|zsh|fish\n") and "source <(raypar completion bash)" in out
    assert all(f"raypar completion {shell} > " in out for shell in ("bash", "zsh", "fish"))


@pytest.mark.parametrize("words", [[], ["tcsh"], ["bash", "zsh"]])
def test_another_shell_is_a_mistake(words):
    with pytest.raises(ConfigError, match=r"name one shell: raypar completion bash\|zsh\|fish"):
        completion(words)
