"""Parse the words of a command that trains nothing: all mistakes in them at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import Field, fields
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import tyro

from raypar.cli.words.flags import read_flags
from raypar.cli.words.help_text import Help
from raypar.errors import ConfigError


class Arguments(Protocol):
    """The words of a command, parsed: a dataclass, one of whose fields may be a word without a flag."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def faults(self) -> Iterable[str]:
        """Return which values are out of range or do not go together; none, if the types say it all."""
        return ()


class CommandOutcome(NamedTuple):
    """Outcome of a command.

    Attributes:
        text: The text to print.
        sound: Whether everything that was examined is sound; else the exit code says so.
    """

    text: str
    sound: bool = True


A = TypeVar("A", bound=Arguments)


def parse_command(blank: A, words: Sequence[str], command: str, what: str, missing: str = "") -> A:
    """Parse the words of a command.

    Args:
        blank: The arguments before any word is read.
        words: The words after the command.
        command: The command's name.
        what: What the command does, for its help.
        missing: What to say if the word without a flag is missing; "" if the command has none or needs none.

    Raises:
        ConfigError: There are mistakes. The error lists all of them.
        HelpAsked: The words ask for help.
    """
    Help(command, what, type(blank), blank).raise_if_asked(words)
    sound, wrong = read_flags(type(blank), words, blank)
    faults, known = [fault.text for fault in wrong], {field.name for field in fields(blank)}
    absent = bool(missing) and (not sound or sound[0].startswith("--"))
    if absent and known.issuperset(fault.path for fault in wrong):  # else it may be the value of an unknown flag
        faults.append(missing)
    args = tyro.cli(type(blank), args=["", *sound] if absent else sound, prog=f"raypar {command}")
    ConfigError.raise_if([*faults, *args.faults()])
    return args


def given(count: int) -> str:
    """Say how many words without a flag are given, where they are too few or too many."""
    return "1 word is given" if count == 1 else f"{count} words are given"
