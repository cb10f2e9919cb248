"""The fields that flags set: their names, types, defaults, what is said of them, and which words they take."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from raypar.config.toml import KINDS

_VALUES = {int: "N", float: "X", Path: "FILE", NoneType: "none", bool: "true|false"}


class FlagField(NamedTuple):
    """A field that a flag sets.

    Attributes:
        path: The field, such as ``mesh.pp``.
        owner: The class that has it.
        hint: Its type without bounds.
        default: Its value without a flag.
    """

    path: str
    owner: type
    hint: Any
    default: Any

    @property
    def spelled(self) -> str:
        """The flag, such as ``--mesh.pp``."""
        return spelled(self.path)

    @property
    def off(self) -> str:
        """The flag that switches it off, such as ``--model.no-tied``; "" if there is none."""
        part, dot, name = self.path.rpartition(".")
        has_off = bool in members(self.hint) and name not in dict(extras(self.owner))
        return spelled(f"{part}{dot}no_{name}") if has_off else ""

    @property
    def short(self) -> str:
        """Its short name, such as ``-o``; "" if it has none."""
        return next((short for short, flag in aliases(self.owner).items() if flag == self.spelled), "")

    @property
    def value(self) -> str:
        """What it takes, as ``N`` or ``none|step``; "" for a switch."""
        return "" if self.hint is bool else _value(self.hint)

    @property
    def choices(self) -> list[str]:
        """The words among which its value is; none if it may be another one."""
        found = [one for one in members(self.hint) if not isinstance(one, type) and not get_origin(one)]
        return self.value.split("|") if {*self.value.split("|")} <= {*map(str, found), "none", "true", "false"} else []

    @property
    def about(self) -> str:
        """What its class says of it, in the words of a command line."""
        return re.sub(r"\bNone\b", "none", abouts(self.owner).get(self.path.rpartition(".")[2], ""))


def flag_fields(kind: type, default: object, below: str = "") -> Iterator[FlagField]:
    """Yield every field that has a flag.

    Args:
        kind: The class whose fields the flags are.
        default: Its values before the flags, which give the classes of nested fields.
        below: What precedes the paths.
    """
    hints = get_type_hints(kind)
    for field in fields(kind):
        value = getattr(default, field.name, None)
        if is_dataclass(value):
            yield from flag_fields(type(value), value, f"{below}{field.name}.")
        elif field.name != word_alone(kind)[0]:
            hint = Literal[*KINDS[below[:-1]]] if field.name == "kind" and below[:-1] in KINDS else hints[field.name]
            yield FlagField(f"{below}{field.name}", kind, hint, value)


def blank(kind: type, **given: Any) -> Any:
    """Return the arguments of a class without any word.

    Args:
        kind: The class, a dataclass.
        given: Fields with other values than their defaults.
    """
    needed = [one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]
    return kind(**dict.fromkeys(needed, "") | given)


@cache
def abouts(kind: type) -> dict[str, str]:
    """Return what the strings below the fields of a class and of its bases say, by the names of the fields."""
    found = dict[str, str]()
    for base in reversed(kind.__mro__):
        if not is_dataclass(base):
            continue
        (tree,) = ast.parse(dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for one, after in pairwise(tree.body):
            match one, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


@cache
def extras(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return the names of a class's fields with what is said of their flags beside the type."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple((name, extra) for name, hint in hints.items() for extra in getattr(hint, "__metadata__", ()))


def word_alone(kind: type) -> tuple[str, str]:
    """Return the field that is a word without a flag, and how help calls it; empty texts if there is none."""
    named = ((name, getattr(extra, "metavar", None)) for name, extra in extras(kind))
    return next(((name, metavar) for name, metavar in named if metavar), ("", ""))


def aliases(kind: type) -> dict[str, str]:
    """Return the flags by their short names, as ``--out`` by ``-o``."""
    return {alias: spelled(name) for name, extra in extras(kind) for alias in getattr(extra, "aliases", None) or ()}


def members(hint: Any) -> list[Any]:
    """Return the members of a union, and of a Literal in it the words."""
    if get_origin(hint) in (Union, UnionType):
        return [member for one in get_args(hint) for member in members(one)]
    return list(get_args(hint)) if get_origin(hint) is Literal else [hint]


def is_mapping(kind: Any) -> bool:
    """Return whether a type is a mapping, of which words give names and values in turn."""
    return isinstance(get_origin(kind), type) and issubclass(get_origin(kind), Mapping)


def separator(kind: Any) -> str:
    """Return what separates the items of a tuple of some length: of whole numbers a colon, as in ``10:13``."""
    return ":" if {*get_args(kind)} == {int} else " "


def spelled(path: str) -> str:
    """Return the flag of a field."""
    return f"--{path.replace('_', '-')}"


def _value(hint: Any) -> str:
    of_one_word = [one for one in members(hint) if not is_dataclass(one)]  # the fields of others have flags
    return "|".join(dict.fromkeys(map(_word, of_one_word)))


def _word(one: Any) -> str:
    """Return the placeholder for the values of a type, or a word of a Literal."""
    items = [item for item in get_args(one) if item is not Ellipsis]
    if is_mapping(one):
        return f"NAME {_value(items[1])} ..."
    if get_origin(one) is tuple:
        return f"{_value(items[0])} ..." if Ellipsis in get_args(one) else separator(one).join(map(_value, items))
    return _VALUES.get(one, "TEXT") if isinstance(one, type) else str(one)
