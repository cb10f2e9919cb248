"""``raypar completion``: a script with which a shell completes the words of a command line.

A shell may ask for it whenever it starts: the flags are read from shells/flags.json, for which nothing is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypar.cli.commands import COMMANDS

_FOLDER = Path(__file__).with_name("shells")
TABLE = _FOLDER / "flags.json"
_USAGE = "raypar completion bash|zsh|fish"
_HELP = f"""\
usage: {_USAGE}

Print a script with which a shell completes the words of a command line.

  source <(raypar completion bash)  in the present shell; zsh and fish too, below compinit, or by raypar completion \
fish | source
  raypar completion bash > ~/.local/share/bash-completion/completions/raypar  from now on
  raypar completion zsh > ~/.zfunc/_raypar  from now on, with fpath+=~/.zfunc before compinit in ~/.zshrc
  raypar completion fish > ~/.config/fish/completions/raypar.fish  from now on"""


@dataclass(frozen=True)
class CompletedFlag:
    """A flag as shells complete it.

    Attributes:
        name: The flag.
        short: Its short name; "" if it has none.
        about: What it does, the beginning of it.
        words: The words that it takes.
        takes: What it takes: "" for a switch, "words", "number", "file", or "words and files".
    """

    name: str
    short: str
    about: str
    words: Sequence[str]
    takes: str


@dataclass(frozen=True)
class Completed:
    """A command as shells complete it.

    Attributes:
        name: The command, as "ckpt ls".
        flags: Its flags.
        words: Words that it takes beside files.
    """

    name: str
    flags: Sequence[CompletedFlag]
    words: Sequence[str]


def completion(words: Sequence[str]) -> str:
    """Run ``raypar completion``.

    Args:
        words: The words after ``completion``: the shell.

    Raises:
        ConfigError: There is no script for that.
        HelpAsked: The words ask for help.
    """
    if {"-h", "--help"} & {*words}:
        from raypar.cli.words.columns import fitted, terminal_width
        from raypar.cli.words.help_text import HelpAsked

        raise HelpAsked(fitted(_HELP, terminal_width()))
    shells = sorted(path.stem for path in _FOLDER.glob("*.jinja"))
    if len(words) != 1 or words[0] not in shells:
        from raypar.errors import ConfigError

        raise ConfigError([f"name one shell: {_USAGE}, as in: source <(raypar completion bash)"])
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    template = Environment(loader=FileSystemLoader(_FOLDER), **options).get_template(f"{words[0]}.jinja")
    parts = {name: [*one.arguments] for name, one in COMMANDS.items() if [*one.arguments] not in ([], [""])}
    parts["completion"] = shells
    return template.render(commands=completed(), names=summaries(), parts=parts).rstrip()


def completed() -> list[Completed]:
    """Return the commands that have flags or take words."""
    table = json.loads(TABLE.read_text())
    flags = [CompletedFlag(*row) for row in table["flags"]]
    return [Completed(name, [flags[at] for at in numbers], words) for name, numbers, words in table["commands"]]


def summaries() -> dict[str, str]:
    """Return what each command does, from the text of ``raypar --help``."""
    text = Path(__file__).with_name("help.txt").read_text()
    found = dict[str, str]()
    for name, about in re.findall(r"^  raypar ([a-z]+)\b.*?  (.*)", text, re.MULTILINE):
        found.setdefault(name, about)
    return found
