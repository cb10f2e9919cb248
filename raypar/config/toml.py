"""Runs from TOML files. Strict: an unknown key or a wrong type is a fault, and all faults are told at once.

recipe = "gpt-small"   # optional: what the rest changes
steps = 200
split = [3, 5]
clip = "none"          # where a field may be None

[model]                # the fields that are not named keep the recipe's values
layers = 12

[optim]
kind = "sgd"
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from raypar.actors.files import read_named
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.optim import SGD, AdamW
from raypar.actors.specs.run import Run
from raypar.config.fields import brief, field_faults
from raypar.config.recipes import recipe
from raypar.config.run import rooted
from raypar.errors import ConfigError
from raypar.paths import absolute
from raypar.schedules.schedule import Schedule
from raypar.schedules.torch_csv import to_csv


def flat(table: Mapping[str, Any], below: str = "") -> dict[str, Any]:
    """Values by dotted path."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{below}{key}.") if isinstance(value, dict) else {f"{below}{key}": value}
    return found


T = TypeVar("T")

_MOST_BYTES = 1 << 20
_MOST_DOTS = 100  # in a line
_KINDS: dict[str, dict[str, type[Any]]] = {  # by field: what may stand there
    "model": {"gpt": GPT, "llama": Llama},
    "optim": {"adamw": AdamW, "sgd": SGD},
}
_COMMON = {  # what another kind takes over; the rest are its own defaults
    "model": ("layers", "hidden", "heads", "seq", "vocab", "dropout", "tied", "attention"),
    "optim": ("warmup", "decay", "final"),
}


def load_run(path: Path, base: Run | None = None) -> Run:
    """The run that a TOML file describes: what it does not name comes from its ``recipe``, else from ``base``.

    Paths in it are counted from the working directory. Raises ConfigError for a file that can't be read or is not
    TOML, and for unknown keys and wrong types, all at once, with the values that are out of range. If those are all
    that is wrong, the file is read: ``check_run`` tells them, with what it alone finds.
    """
    return run_of(read_table(path), base)


def plain_of(run: Run) -> dict[str, Any]:
    """The run as plain data, of which ``run_of`` makes it again, from any working directory.

    It refuses what stands there for functions, and for a Schedule that is no name.
    """
    folder = run.folder if run.folder is None else str(absolute(run.folder))
    table: dict[str, Any] = _written(replace(run, data=rooted(run.data), folder=folder))
    return table


def toml_of(plain: Mapping[str, Any]) -> str:
    """Plain data with tables of one level as TOML."""
    tables = {key: value for key, value in plain.items() if isinstance(value, dict)}
    lines = [f"{key} = {_spelled(value)}" for key, value in plain.items() if key not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_spelled(value)}" for key, value in table.items())]
    return "\n".join([*lines, ""])


def read_table(path: Path) -> dict[str, Any]:
    """A TOML file as it is; raises ConfigError, with the line if it is not TOML."""
    try:
        return parsed(read_named(path, _MOST_BYTES))
    except OSError as error:
        raise ConfigError([f"{str(path)!r} can't be read ({error.strerror}): correct the path"]) from error
    except ValueError as error:
        raise ConfigError([f"{str(path)!r} is not TOML ({error}): correct that place"]) from error


def parsed(raw: bytes) -> dict[str, Any]:
    """What TOML says. Raises ValueError, also for what would take far more time or memory than it has bytes."""
    if any(line.count(b".") > _MOST_DOTS for line in raw.split(b"\n")):  # tomllib takes memory by the square of them
        raise ValueError(f"more than {_MOST_DOTS} dots in a line")
    try:
        return tomllib.loads(raw.decode())
    except RecursionError as error:
        raise ValueError("nested too deeply: a run has tables of one level") from error


def run_of(table: Mapping[str, Any], base: Run | None = None) -> Run:
    """``load_run`` for what has been read already."""
    faults: list[str] = []
    rest = dict(table)
    own = {part: table[part]["fn"] for part in ("model", "data") if "fn" in _part(table, part)}
    if own:
        how = "what has functions of yours is run in Python, launch(run, resume=...)"
        raise ConfigError([f"{part}.fn is {brief(name)}: {how}" for part, name in own.items()])
    start = base or Run()
    if "recipe" in rest:
        try:
            start = recipe(str(rest.pop("recipe")))
        except ConfigError as error:
            faults += error.faults
    run = _changed(start, rest, "", faults)
    wrong = list(field_faults(run))
    if faults or any(fault.of_type for fault in wrong):
        raise ConfigError([*faults, *(fault.text for fault in wrong)])
    return run


def _part(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = table.get(name)
    return part if isinstance(part, Mapping) else {}


def of_kind(name: str, kind: object, like: T) -> T:
    """The model or optimizer (``name`` says which) of a kind: ``like`` if it is that kind, else one with defaults of
    its own and what the two have in common: a model's sizes, an optimizer's schedule.

    Raises ConfigError for a kind that is not known.
    """
    kinds = _KINDS[name]
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError([f"{name}.kind is {brief(kind)}: use {' or '.join(map(repr, kinds))}"])
    if isinstance(like, kinds[kind]):
        return like
    common = {field: getattr(like, field, None) for field in _COMMON[name]}
    made: T = kinds[kind](**{field: value for field, value in common.items() if value is not None})
    return made


def _changed(base: T, table: Mapping[str, Any], below: str, faults: list[str]) -> T:
    """``base`` with the fields that the table names; the keys that it should not name go to ``faults``."""
    assert is_dataclass(base) and not isinstance(base, type)
    hints = get_type_hints(type(base))
    names = [field.name for field in fields(base)]
    changes: dict[str, Any] = {}
    for key, value in table.items():
        path, old = f"{below}{key}", getattr(base, key, None)
        if key not in names:
            faults.append(f"{path} is not a field{_guess(key, names)}")
        elif not is_dataclass(old) or isinstance(old, Schedule):
            changes[key] = _plain(value, hints[key])
        elif not isinstance(value, dict):
            faults.append(f"{path} is {brief(value)}: write its fields in a table [{path}]")
        else:
            inner = dict(value)
            if path in _KINDS and "kind" in inner:
                try:
                    old = of_kind(path, inner.pop("kind"), old)
                except ConfigError as error:
                    faults += error.faults
            changes[key] = _changed(old, inner, f"{path}.", faults)
    return replace(base, **changes)


def _plain(value: Any, hint: Any) -> Any:
    """TOML's lists as tuples, and "none" as None where a field may be None."""
    if isinstance(value, list):
        return tuple(value)
    return None if value == "none" and type(None) in get_args(hint) else value


def _written(value: Any) -> Any:
    """``_plain`` backwards; functions by their names, a Schedule as its table, a plan as pairs."""
    if isinstance(value, Schedule):
        return {"csv": to_csv(value)}
    if is_dataclass(value):
        return {field.name: _written(getattr(value, field.name)) for field in fields(value)}
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else type(value).__name__
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return [[key, one] for key, one in value.items()]
    return [*value] if isinstance(value, tuple) else value


def _spelled(value: Any) -> str:
    """A value as TOML spells it: as JSON, but for the one character that JSON leaves as it is and TOML does not."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _guess(key: str, names: Iterable[str]) -> str:
    known = sorted(names)
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f": did you mean {close[0]!r}?" if close else f": known are {', '.join(known)}"
