"""The help of a command: the flags that most people use, all of them in groups, or those about a subject."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from raypar.cli.words.columns import fitted, terminal_width
from raypar.cli.words.flag_fields import FlagField, abouts, flag_fields, word_alone
from raypar.cli.words.flags import HELP

OWN = "flags of its own"


class HelpAsked(Exception):  # noqa: N818  (it is no error)
    """Help was asked for, and this is its text."""


class Help(NamedTuple):
    """What the help of a command says.

    Attributes:
        command: The command's name, and words that follow it always.
        what: What it does.
        kind: The class of its arguments.
        default: Its arguments before any word.
        is_run: Whether most of its flags are fields of a run, so that help without "all" shows a few.
        has_word: Whether it takes a word without a flag.
        more: What follows all flags.
    """

    command: str
    what: str
    kind: type
    default: Any
    is_run: bool = False
    has_word: bool = True
    more: str = ""

    def raise_if_asked(self, words: Sequence[str]) -> None:
        """Raise HelpAsked if words ask for help: ``--help``, ``--help all``, or ``--help`` and a subject."""
        asked = next((at for at, word in enumerate(words) if word in HELP), None)
        if asked is not None:
            raise HelpAsked(fitted(self._text(*words[asked + 1 : asked + 2]), terminal_width()))

    def _text(self, subject: str = "") -> str:
        """Return the lines, to be wrapped."""
        usual, every = _groups()[0], [*flag_fields(self.kind, self.default)]
        groups = self.groups(every)
        found = every if subject == "all" else [one for one in every if _is_about(subject, one, groups)]
        is_short = not found
        if is_short:
            few = [one for one in every if one.path in usual] if self.is_run else []
            found = few or [one for one in every if "." not in one.path] or every
        name, metavar = word_alone(self.kind) if self.has_word else ("", "")
        lines = [f"usage: raypar {' '.join(filter(None, (self.command, metavar)))} [flags]", "", self.what, ""]
        if name:
            base = getattr(self.default, name) if self.is_run else ""
            lines += [f"  {metavar}  {abouts(self.kind)[name]}{f' (default: {base})' if base else ''}", ""]
        if is_short:
            lines += [*map(row, sorted(found, key=lambda one: usual.index(one.path) if self.is_run else 0))]
        else:
            for title, members in groups.items():
                shown = [row(one) for one in members if one in found]
                lines += [f"{title}:", *shown, ""] if shown else []
        lines.append("  -h, --help [all]  this, or all flags in groups; or those about a word, as --help mesh")
        if len(found) < len(every):
            lines += ["", f"{len(found)} of {len(every)} flags: the others with raypar {self.command} --help all"]
        return "\n".join([*lines, *(["", self.more] if self.more and not is_short else [])])

    def groups(self, every: Iterable[FlagField]) -> Mapping[str, list[FlagField]]:
        """Return the flags by the titles of their groups, the command's own first."""
        titles = dict[str, list[FlagField]]({OWN: []})
        table = _groups()[1] if self.is_run else {"the mesh": ["mesh.*"]}
        titles |= {title: [] for title in table}
        for one in every:
            fit = [(len(p), title) for title, patterns in table.items() for p in patterns if fnmatchcase(one.path, p)]
            titles[max(fit)[1] if fit else OWN].append(one)
        return titles


def row(one: FlagField) -> str:
    """Return the line of a flag, in two columns."""
    names = ", ".join(filter(None, (one.short, one.spelled, one.off)))
    text = one.about.replace("``", "")
    default = default_text(one.default)
    given = "" if default in ("none", "off") else f" (default: {default})"
    return f"  {names}{' ' if one.value else ''}{one.value}  {text}{given}"


def default_text(value: Any) -> str:
    """Return a value as the words of a command line say it."""
    match value:
        case None | () | "":
            return "none"
        case bool(is_on):
            return "on" if is_on else "off"
        case dict(pairs):
            return " ".join(f"{name} {one}" for name, one in pairs.items()) or "none"
        case tuple(items):
            return " ".join(map(str, items))
    return str(value)


def _is_about(subject: str, one: FlagField, groups: Mapping[str, Sequence[FlagField]]) -> bool:
    title = next(title for title, members in groups.items() if one in members)
    return bool(subject) and (subject in one.path.replace("_", "-") or subject.lower() in title.lower())


def _groups() -> tuple[list[str], dict[str, list[str]]]:
    """Return the fields that help shows without "all", and the patterns of each group's fields."""
    table = tomllib.loads(Path(__file__).with_name("groups.toml").read_text())
    return table["usual"], table["groups"]
