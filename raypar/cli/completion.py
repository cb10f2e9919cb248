"""``raypar completion``: a script with which a shell completes the words of a command line."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from raypar.actors.specs.data import Examples
from raypar.actors.specs.lora import Lora
from raypar.actors.specs.model import GPT, Llama, RopeScaling
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.optim import SGD, Muon
from raypar.actors.specs.run import Run
from raypar.cli.commands import COMMANDS
from raypar.cli.words.flag_fields import FlagField, blank, flag_fields, word_alone
from raypar.config.recipe_tables import RECIPES
from raypar.errors import ConfigError
from raypar.schedules.catalog import CATALOG

_FOLDER = Path(__file__).with_name("shells")
_USAGE = "raypar completion bash|zsh|fish"
_LONG = 72  # characters of what a flag does
_NUMBER = re.compile("[NX](\\|.*)?")
_PARTS: Sequence[dict[str, Any]] = (  # each with other fields
    {},
    {"model": GPT(moe=MoE())},
    {"model": Llama(rope_scaling=RopeScaling(), lora=Lora())},
    {"optim": SGD()},
    {"optim": Muon()},
    {"data": Examples("")},
)


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
    """
    shells = sorted(path.stem for path in _FOLDER.glob("*.jinja"))
    if len(words) != 1 or words[0] not in shells:
        raise ConfigError([f"name one shell: {_USAGE}, as in: source <(raypar completion bash)"])
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    template = Environment(loader=FileSystemLoader(_FOLDER), **options).get_template(f"{words[0]}.jinja")
    parts = {name: [*one.arguments] for name, one in COMMANDS.items() if [*one.arguments] not in ([], [""])}
    parts["completion"] = shells
    return template.render(commands=completed(), names=summaries(), parts=parts).rstrip()


def completed() -> list[Completed]:
    """Return the commands that have flags or take words."""
    return [
        _completed(f"{name} {part}".strip(), pkgutil.resolve_name(f"raypar.cli.{kind}"))
        for name, command in COMMANDS.items()
        for part, kind in command.arguments.items()
    ]


def fields_of_every_part(kind: type) -> list[FlagField]:
    """Return the fields that flags set with any model, data and optimizer, each once.

    Args:
        kind: The class of a command's arguments.
    """
    parts = _PARTS if issubclass(kind, Run) else ({},)
    found = dict[str, FlagField]()
    for part in parts:
        for one in flag_fields(kind, blank(kind, **part)):
            found.setdefault(one.path, one)
    return [*found.values()]


def summaries() -> dict[str, str]:
    """Return what each command does, from the text of ``raypar --help``."""
    text = Path(__file__).with_name("help.txt").read_text()
    found = dict[str, str]()
    for name, about in re.findall(r"^  raypar ([a-z]+)\b.*?  (.*)", text, re.MULTILINE):
        found.setdefault(name, about)
    return found


def _completed(name: str, kind: type) -> Completed:
    metavar = word_alone(kind)[1]
    words = RECIPES if "RECIPE" in metavar else CATALOG if "SCHEDULE" in metavar else ()
    flags = list[CompletedFlag]()
    for one in fields_of_every_part(kind):
        choices = one.choices
        takes = "words" if choices else "number" if _NUMBER.fullmatch(one.value) else "file" if one.value else ""
        if one.path == "schedule":
            choices, takes = [*CATALOG], "words and files"
        about = shorten(one.about, _LONG, placeholder="...")
        flags.append(CompletedFlag(one.spelled, one.short, about, choices, takes))
        if one.off:
            flags.append(CompletedFlag(one.off, "", f"not: {about}", (), ""))
    if name == "sft":
        flags.append(CompletedFlag("--model", "", "folder of a model of Hugging Face", (), "file"))
    return Completed(name, flags, [] if name == "sft" else [*words])
