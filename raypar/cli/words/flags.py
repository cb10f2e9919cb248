"""The flags of a command: which words belong to which flag, and all mistakes in them at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from raypar.actors.known_fields import COMMON_NAMES, unknown_faults
from raypar.cli.words.examples import pattern_of
from raypar.cli.words.flag_fields import (
    aliases,
    extras,
    flag_fields,
    is_mapping,
    members,
    separator,
    spelled,
    word_alone,
)
from raypar.config.fields import FieldFault
from raypar.config.recipe_tables import RECIPES
from raypar.config.toml import kind_hint
from raypar.schedules.nearest_name import did_you_mean

HELP = {"-h", "--help"}
_NUMBERS = {int: "a whole number", float: "a number"}
_MANY = {int: "whole numbers", float: "numbers"}
_PAIRS = {float: "'head.*' 0.5", int: "'head.*' 4", str: "blocks.0.mlp.experts '1 0'"}  # by the type of the value
_SHORT = {"precision": "precision.compute"}  # what a flag without the name of a part's field means
_FIELD = re.compile(r"([a-z_]*(?:\.[a-z_]+)*)((?:\.\d+)?)")  # a field, and the number of an item in it
_ELSEWHERE = {  # flags of other programs, and what raypar has instead
    "epochs": "a run has --steps; the dry run says how many passes over the data they are",
    "gpus": "actors are the product of --mesh.pp, --mesh.dp, --mesh.cp and --mesh.tp, each with its own device",
}
_FILES = {"data.path", "data.val_path"}  # of which a pattern without quotes gives several
_SWITCHED = ("true", "false", "yes", "no", "on", "off", "0", "1")


@dataclass(frozen=True)
class _Flag:
    """A flag on a command line.

    Attributes:
        typed: The flag as it is written, such as ``--mesh.pp``.
        path: Its field, such as ``mesh.pp``.
        values: The words that belong to it.
        hint: The type of its field; None if there is no such field.
        surplus: A word after a switch that looks like a value for it.
    """

    typed: str
    path: str
    values: Sequence[str]
    hint: Any
    surplus: str = ""

    def words(self) -> list[str]:
        """Return the words as tyro reads them."""
        name = spelled(self.path).removeprefix("--") if self.values else self.typed.removeprefix("--")
        if any(_fits(self.values, kind) for kind in members(self.hint) if kind in (NoneType, bool)):
            return [f"--{name}", self.values[0].capitalize()]
        return [f"--{name}", *self.values]


_NO_FLAG = _Flag("", "", (), None)


def read_flags(
    kind: type,
    words: Sequence[str],
    default: object,
    wrong: Sequence[FieldFault] = (),
    *,
    has_word: bool = True,
    others: Sequence[str] = (),
) -> tuple[list[str], list[FieldFault]]:
    """Find the mistakes in the flags of a command.

    Args:
        kind: The class whose fields the flags are; one of them may have a ``metavar``, and is a word without a flag, or
            several if it is a tuple.
        words: The words of a command line.
        default: Its values before the flags, which give the classes of nested fields.
        wrong: Faults that are known already. Flags of these fields are left out without another fault.
        has_word: Whether the command takes the word without a flag.
        others: Names of flags that the command takes out of the words before.

    Returns:
        The words of all other flags, as the parser reads them, and a fault for each flag that is unknown, has no value,
        or a value that its field can't have.
    """
    sound, alone = list[str](), list[str]()
    faults, known = list[FieldFault](), {fault.path for fault in wrong}
    before, strays = _NO_FLAG, dict[str, list[str]]()
    for flag in _grouped(kind, words, default):
        if isinstance(flag, str):
            is_stray = before.path in _FILES and not is_base(flag) and Path(flag).is_file()
            (strays.setdefault(before.typed, [*before.values]) if is_stray else alone).append(flag)
            continue
        before = flag
        if flag.path not in known:
            is_known = flag.hint is not None
            wrong_here = list(_faults_of(kind, flag) if is_known else _unknown(kind, flag, default, others))
            faults += [FieldFault(flag.path, text, of_type=True) for text in wrong_here]
            sound += [] if wrong_here else flag.words()
    faults += [FieldFault("data", _unquoted(typed, files), of_type=True) for typed, files in strays.items()]
    name, metavar = word_alone(kind) if has_word else ("", "")
    most = _most_words(get_type_hints(kind)[name]) if name else 0
    for word in alone[most:]:
        fix = f"only one {metavar} is read" if name else "all that is read are flags"
        faults.append(FieldFault(name, f"{word!r} is a word too many: {fix}", of_type=True))
    return [*alone[:most], *sound], faults


def _unquoted(typed: str, files: Sequence[str]) -> str:
    """Say that several files follow a flag that takes one, as after a pattern that the shell has read."""
    fix = f"for several files give a pattern in quotes, {typed} {pattern_of(files)}"
    return f"{typed} takes one word, and {len(files)} files are given: {fix}"


def named_as_typed(faults: Iterable[str], words: Sequence[str]) -> list[str]:
    """Return faults of fields, each beginning with the flag that was typed instead of the field.

    Args:
        faults: Sentences, such as "steps is 0: it must be at least 1".
        words: The words of the command line.
    """
    typed = [word.partition("=")[0] for word in words if word.startswith("--")]
    flags = {flag.removeprefix("--").replace("-", "_"): flag for flag in typed}
    flags |= {_SHORT[path]: flag for path, flag in flags.items() if path in _SHORT}
    return [_as_typed(fault, flags) for fault in faults]


def _as_typed(fault: str, flags: Mapping[str, str]) -> str:
    path, item = _FIELD.match(fault).groups()  # type: ignore[union-attr]  # it matches any text
    if path not in flags:
        return fault
    return f"{flags[path]}: {fault}" if item else flags[path] + fault.removeprefix(path)


def _grouped(kind: type, words: Sequence[str], default: object) -> Iterator[_Flag | str]:
    """Yield the flags with their values, and the words that belong to none."""
    index, short, hints = 0, aliases(kind), {one.path: one.hint for one in flag_fields(kind, default)}
    while index < len(words):
        typed, equals, value = words[index].partition("=")
        typed = short.get(typed, typed)
        index += 1
        if not typed.startswith("--"):
            word = words[index - 1]
            yield _Flag(word, word, (), None) if word.startswith("-") and len(word) > 1 else word
            continue
        path = _path_typed(typed)
        path = _field_of(kind, _SHORT.get(path, path), hints)
        hint = hints.get(path)
        after: list[str] = []
        while index + len(after) < len(words) and not words[index + len(after)].startswith("--"):
            after.append(words[index + len(after)])
        if hint is bool:
            looks = [value] if equals else after[:1] if after and after[0].lower() in _SWITCHED else []
            index += 0 if equals else len(looks)
            yield _Flag(typed, path, (), hint, *looks)
            continue
        most = max(map(_most_words, members(hint)))
        if hint is None:  # one fault is enough, without one for each of its values
            most = len([*takewhile(lambda word: not is_base(word), after)])
        values = [value] if equals else after[:most]
        is_off = path != _path_typed(typed)
        is_alone = bool in members(hint) and not equals and (is_off or not values or is_base(values[0]))
        values = [] if is_alone else values
        index += 0 if equals else len(values)
        values = [item for one in values for item in _items(one, hint)]
        if is_alone:
            values = ["false" if is_off else "true"]
        yield _Flag(typed, path, values, hint)


def _path_typed(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def is_base(word: str) -> bool:
    """Return whether a word names a recipe or a file of a run."""
    return word in RECIPES or Path(word).suffix == ".toml"


def _field_of(kind: type, path: str, hints: Mapping[str, Any]) -> str:
    """Return the path of a flag's field: ``--model.no-tied`` is a flag of ``model.tied``."""
    part, dot, name = path.rpartition(".")
    on = f"{part}{dot}{name.removeprefix('no_')}"
    is_off = path not in hints and bool in members(hints.get(on)) and on not in dict(extras(kind))
    return on if is_off else path


def _items(word: str, hint: Any) -> list[str]:
    """Return the items of a tuple that are in one word, as 10 and 13 in ``10:13``; else the word."""
    is_span = any(get_origin(one) is tuple and separator(one) == ":" for one in members(hint))
    return word.split(":") if is_span else [word]


def _most_words(kind: Any) -> int:
    """Return how many words a value of a type takes at most."""
    if get_origin(kind) is tuple:
        items = get_args(kind)
        return 1 << 30 if Ellipsis in items else 1 if separator(kind) == ":" else len(items)
    return 1 << 30 if is_mapping(kind) else 1


def _faults_of(kind: type, flag: _Flag) -> Iterator[str]:
    """Yield what is wrong with a flag that there is."""
    if flag.surplus:
        off = ".".join([*flag.path.split(".")[:-1], f"no-{flag.path.split('.')[-1]}"]).replace("_", "-")
        fix = f"write {flag.typed} alone, or --{off}"
        yield f"{flag.typed} is a switch, and takes no {flag.surplus!r}: {fix}"
    elif flag.hint is not bool:
        kinds = members(flag.hint)
        many = {item for one in kinds if get_origin(one) is tuple for item in members(get_args(one)[0])}
        choices = " or ".join(_word(one) for one in kinds if one not in many)
        if not [value for value in flag.values if value]:
            if str not in kinds or not flag.values:
                yield f"{flag.typed} has no value: give {choices}"
        elif not any(_fits(flag.values, one) for one in kinds):
            asked = next((separator(one) for one in kinds if get_origin(one) is tuple), " ").join(flag.values)
            yield f"{flag.typed} is {asked!r}: it must be {choices}"


def _word(kind: Any) -> str:
    """Say what a value of a type is."""
    if get_origin(kind) is tuple and separator(kind) == ":":
        return f"{len(get_args(kind))} whole numbers, as 10:13"
    if get_origin(kind) is tuple:
        items = [item for item in get_args(kind) if item is not Ellipsis]
        many = "one or more" if Ellipsis in get_args(kind) else str(len(items))
        one = members(items[0])
        return f"{many} of {' or '.join(map(_word, one))}" if len(one) > 1 else f"{many} {_MANY.get(items[0], 'texts')}"
    if is_mapping(kind):
        name, value = get_args(kind)
        return f"pairs of {_word(name)} and {_word(value)}, such as {_PAIRS[value]}"
    if kind is NoneType:
        return "none"
    if kind is bool:
        return "true or false"
    if isinstance(kind, str | int) or kind in _NUMBERS:  # a value of a Literal, or a type
        return _NUMBERS.get(kind, str(kind))
    return "a path" if kind is Path else "a text"


def _fits(values: Sequence[str], kind: Any) -> bool:
    """Return whether words may be a value of a type; the parser looks at types that are not known here."""
    if get_origin(kind) is tuple:
        items = get_args(kind)
        long = Ellipsis in items or len(items) == len(values)
        return long and all(any(_fits([value], one) for one in members(items[0])) for value in values)
    if is_mapping(kind):
        named = values[1::2]
        return len(values) % 2 == 0 and all(_fits([value], get_args(kind)[1]) for value in named)
    if get_origin(kind) is not None:
        return True
    if len(values) != 1:
        return False
    if kind is NoneType:
        return values[0].lower() == "none"
    if kind is bool:
        return values[0].lower() in ("true", "false")
    if kind not in _NUMBERS:
        return isinstance(kind, type) or values[0] == str(kind)
    try:
        kind(values[0])
    except ValueError:
        return False
    return True


def _unknown(kind: type, flag: _Flag, default: object, others: Sequence[str]) -> Iterator[str]:
    """Yield the fault of a flag that there is not, with what may have been meant."""
    part, _, name = flag.path.rpartition(".")
    if hint := kind_hint(part, name):
        (fault,) = unknown_faults(type(getattr(default, part)).__name__, [name])
        yield f"{flag.typed}: {fault}{'' if ': it has ' in fault else f': {hint}'}"
        return
    paths = [one.path for one in flag_fields(kind, default)]
    beside = [path for path in paths if path.rpartition(".")[0] == part]
    same = [path for path in paths if path.rpartition(".")[2] in (name, COMMON_NAMES.get(name))]
    begun = [path for path in paths if len(name) > 1 and path.startswith(flag.path)]
    inside = [path for path in paths if path.startswith(f"{flag.path}.")]
    if "mesh.pp" in paths and name.removeprefix("num_") in _ELSEWHERE:
        fix = _ELSEWHERE[name.removeprefix("num_")]
    elif inside:
        fix = f"give its parts, {_listed(inside)}"
    elif same or begun:
        fix = f"did you mean {' or '.join(map(spelled, same or begun[:3]))}?"
    elif part and beside:
        last = [path.rpartition(".")[2] for path in beside]
        close = did_you_mean(name, last, spelled=lambda one: spelled(f"{part}.{one}"), cutoff=0.5)
        fix = f"{close} There are {_listed(beside)}" if close else _listed(beside)
    else:
        fix = did_you_mean(flag.path, [*paths, *others, "help"], "see --help for all flags", spelled=spelled)
    yield f"{flag.typed} is no flag: {fix}"


def _listed(paths: Iterable[str]) -> str:
    return ", ".join(map(spelled, paths))
