"""The help of a command: the flags that most people use, all of them in groups, or those about a subject."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from raypar.cli.words.columns import fitted, terminal_width
from raypar.cli.words.flag_fields import FlagField, abouts, flag_fields, word_alone
from raypar.cli.words.flags import HELP, is_base
from raypar.errors import ConfigError
from raypar.schedules.nearest_name import did_you_mean

OWN = "flags of its own"


class HelpAsked(Exception):  # noqa: N818  (it is no error)
    """Help was asked for, and this is its text."""


class Wording(NamedTuple):
    """What the help of a command of runs says that begins with no recipe or file.

    Attributes:
        usage: The words after the command's name.
        defaults: What fields are without a flag, in words, by path, where that is no value of the run that is shown.
        without: Fields that it has no flags of.
    """

    usage: str
    defaults: Mapping[str, str] = MappingProxyType({})
    without: Collection[str] = ()


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
        wording: What else it says; None: all of that follows from the class of its arguments.
    """

    command: str
    what: str
    kind: type
    default: Any
    is_run: bool = False
    has_word: bool = True
    more: str = ""
    wording: Wording | None = None

    def raise_if_asked(self, words: Sequence[str]) -> None:
        """Raise HelpAsked if words ask for help: ``--help``, ``--help all``, or ``--help`` and a subject.

        Raises:
            ConfigError: The subject is none that help knows.
        """
        asked = next((at for at, word in enumerate(words) if word in HELP), None)
        if asked is not None:
            after = [*words, ""][asked + 1]
            is_subject = not after.startswith("-") and not (self.is_run and self.has_word and is_base(after))
            raise HelpAsked(fitted(self._text(after if is_subject else ""), terminal_width()))

    def subjects(self, every: Iterable[FlagField]) -> list[str]:
        """Return the subjects that help knows: "all", parts of a run and words of groups, or names of flags."""
        paths = [one.path for one in every]
        named = {path.rpartition(".")[0].replace("_", "-") for path in paths}
        if self.is_run:
            named |= {
                word
                for title in _groups()[1]
                for word in re.findall(r"\w+", title.lower())
                if len(word) > 3 or word == "run"
            }
        else:
            named |= {path.replace("_", "-") for path in paths}
        return ["all", *sorted(named - {""})]

    def _text(self, subject: str = "") -> str:
        """Return the lines, to be wrapped."""
        name, metavar = word_alone(self.kind) if self.has_word else ("", "")
        wording = self.wording or Wording(f"[{metavar}]" if name and self.is_run else metavar)
        usual, every = _groups()[0], [*flag_fields(self.kind, self.default)]
        every = [one for one in every if one.path not in wording.without]
        groups = self.groups(every)
        found = every if subject == "all" else [one for one in every if _is_about(subject, one, groups)]
        is_short = not subject
        if is_short:
            few = [one for one in every if one.path in usual] if self.is_run else []
            found = few or [one for one in every if "." not in one.path] or every
        elif not found:
            found = [one for one in every if subject.lower() in one.about.lower()]
        if subject and not found:
            names = [one.path.replace("_", "-") for one in every]
            parts = {part for name in names for part in re.split(r"[.-]", name)}
            words = [*self.subjects(every), *names, *sorted(parts)]
            said = sorted({word for one in every for word in re.findall(r"[a-z]{4,}", one.about)})
            known = ", ".join([*self.subjects(every), "or a part of a flag"])
            fix = did_you_mean(subject, words, spelled=repr) or did_you_mean(
                subject, said, f"give {known}", spelled=repr
            )
            raise ConfigError([f"--help: no flag and no group of flags is named {subject!r}: {fix}"])
        lines = [f"usage: raypar {' '.join(filter(None, (self.command, wording.usage)))} [flags]", "", self.what, ""]
        if name:
            base = getattr(self.default, name) if self.is_run else ""
            lines += [f"  {metavar}  {abouts(self.kind)[name]}{f' (default: {base})' if base else ''}", ""]
        if is_short:
            found = sorted(found, key=lambda one: usual.index(one.path) if self.is_run else 0)
            lines += [row(one, wording.defaults) for one in found]
        else:
            for title, members in groups.items():
                shown = [row(one, wording.defaults) for one in members if one in found]
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


def row(one: FlagField, defaults: Mapping[str, str]) -> str:
    """Return the line of a flag, in two columns.

    Args:
        one: The flag.
        defaults: Defaults in words, by path, of the flags whose defaults are not said by their values.
    """
    names = ", ".join(filter(None, (one.short, one.spelled, one.off)))
    text = one.about.replace("``", "")
    default = defaults.get(one.path, default_text(one))
    given = "" if default in ("none", "off") else f" (default: {default})"
    return f"  {names}{' ' if one.value else ''}{one.value}  {text}{given}"


def default_text(one: FlagField) -> str:
    """Return the default of a flag as the words of a command line say it."""
    match one.default:
        case None | () | "":
            return "none"
        case bool(is_on) if one.hint is bool:
            return "on" if is_on else "off"
        case bool(is_true):
            return str(is_true).lower()
        case dict(pairs):
            return " ".join(f"{name} {value}" for name, value in pairs.items()) or "none"
        case tuple(items):
            return " ".join(map(str, items))
    return str(one.default)


def _is_about(subject: str, one: FlagField, groups: Mapping[str, Sequence[FlagField]]) -> bool:
    title = next(title for title, members in groups.items() if one in members)
    return bool(subject) and (subject in one.path.replace("_", "-") or subject.lower() in title.lower())


def _groups() -> tuple[list[str], dict[str, list[str]]]:
    """Return the fields that help shows without "all", and the patterns of each group's fields."""
    table = tomllib.loads(Path(__file__).with_name("groups.toml").read_text())
    return table["usual"], table["groups"]
