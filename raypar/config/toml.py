"""Read runs from TOML files and write them as TOML. Unknown keys and wrong types are faults, and all are reported.

An example::

    recipe = "gpt-small"   # optional: the run that the other lines change
    layout = "ep2_dp2"     # optional: a layout of experts, see layouts.py
    steps = 200
    split = [3, 5]
    clip = "none"          # None

    [model]                # fields that are left out keep the recipe's values
    layers = 12

    [optim]
    kind = "sgd"
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from raypar.actors.known_fields import COMMON_NAMES, is_none
from raypar.actors.machine.files import read_named
from raypar.actors.specs.model import Transformer
from raypar.actors.specs.precision import Precision
from raypar.actors.specs.run import Run
from raypar.config.absolute_paths import rooted
from raypar.config.expert_layout_names import layout
from raypar.config.fields import FieldFault, collected, field_faults, short_repr
from raypar.config.hugging_face.config_reader import HF
from raypar.config.hugging_face.transformers_model import is_theirs, their_model_again
from raypar.config.recipe_tables import recipe_table
from raypar.errors import ConfigError
from raypar.paths import absolute
from raypar.schedules.nearest_name import did_you_mean
from raypar.schedules.reading.torch_csv import to_csv
from raypar.schedules.schedule import Schedule


def flat(table: Mapping[str, Any], below: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted path, each prefixed with ``below``."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{below}{key}.") if isinstance(value, dict) else {f"{below}{key}": value}
    return found


T = TypeVar("T")

_SCALARS = {"dropout", "seq"}  # of a model in a folder, what may be changed ahead of the reading
_MOST_BYTES = 1 << 20
_MOST_DOTS = 100  # in a line


def _kinds(part: str) -> dict[str, type[Any]]:
    """Return the classes that a part of a run may have, by kind, without those of the user's own functions."""
    classes = get_args(get_type_hints(Run)[part])
    return {one.__name__.lower(): one for one in classes if "fn" not in {field.name for field in fields(one)}}


KINDS = {part: _kinds(part) for part in ("model", "data", "optim")}
_COMMON = {  # the fields that are copied to another kind; the others get its defaults
    "model": ("layers", "hidden", "heads", "seq", "vocab", "dropout", "tied", "attention", "moe"),
    "data": ("path", "tokenizer", "val_path", "val_fraction", "cache"),
    "optim": ("warmup", "decay", "decay_end", "final", "decay_steps", "decay_form", "no_decay", "rates"),
}
_BEFORE = {  # fields that a resumed run keeps, and their values in runs recorded before these fields existed
    ("optim", "decay_end"): "last",
    ("data", "val_from"): "end",
}


def load_run(path: Path, base: Run | None = None) -> Run:
    """Return the run that a TOML file describes.

    Values that are only out of range do not raise here: ``check_run`` reports them together with what it finds.

    Args:
        path: The file. Relative paths inside it start from the working directory.
        base: The run that the file changes, unless the file names a ``recipe``; None for the default run.

    Raises:
        ConfigError: The file can't be read or is not TOML, or it has unknown keys or wrong types. The error lists all
            of them, and the values out of range.
    """
    return run_of(read_table(path), base)


def recorded_run(table: Mapping[str, Any]) -> Run:
    """Return the run that a checkpoint or a run folder has recorded: fields that it lacks have the values of that time.

    Args:
        table: The record.

    Raises:
        ConfigError: As ``run_of``.
    """
    return as_begun(run_of(table), table)


def as_begun(run: Run, record: Mapping[str, Any]) -> Run:
    """Return a run that goes on from a checkpoint, with the fields that a resumed run keeps.

    Args:
        run: The run.
        record: The run that the checkpoint has recorded.
    """
    for (part, name), before in _BEFORE.items():
        of_run = getattr(run, part)
        if hasattr(of_run, name):
            was = _part(record, part).get(name, before)
            run = replace(run, **{part: replace(of_run, **{name: was})})
    return run


def plain_of(run: Run) -> dict[str, Any]:
    """Return a run as plain data, from which ``run_of`` restores it in any working directory.

    Functions and Schedules are written too, but ``run_of`` refuses them.
    """
    folder = run.folder if run.folder is None else str(absolute(run.folder))
    table: dict[str, Any] = _written(replace(rooted(run), folder=folder))
    return table


def changed_of(run: Run) -> dict[str, Any]:
    """Return a run as plain data like ``plain_of``, without the fields that have their defaults."""
    whole = plain_of(run)
    wanted = run_of(whole)

    def without_defaults(table: dict[str, Any]) -> None:
        """Remove fields from a table within the whole, each if the run is the same without it."""
        for name, value in [*table.items()]:
            if isinstance(value, dict):
                without_defaults(value)
            if isinstance(value, dict) and value:
                continue
            del table[name]
            with suppress(ConfigError):
                if run_of(whole) == wanted:
                    continue
            table[name] = value

    without_defaults(whole)
    return whole


def toml_of(plain: Mapping[str, Any]) -> str:
    """Return plain data, with tables in it, as TOML text."""
    return "\n".join([*_lines(plain), ""])


def read_table(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError if it can't be read or is not TOML; the text then names the line."""
    try:
        return parse_toml(read_named(path, _MOST_BYTES))
    except OSError as error:
        raise ConfigError([f"{str(path)!r} can't be read ({error.strerror}): correct the path"]) from error
    except ValueError as error:
        raise ConfigError([f"{str(path)!r} is not TOML ({error}): correct that place"]) from error


def parse_toml(raw: bytes) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: It is not TOML, or would take far more time or memory than its size suggests.
    """
    if any(line.count(b".") > _MOST_DOTS for line in raw.split(b"\n")):  # tomllib's memory grows by their square
        raise ValueError(f"more than {_MOST_DOTS} dots in a line")
    try:
        return tomllib.loads(raw.decode())
    except RecursionError as error:
        raise ValueError("nested too deeply: a run has tables of two levels") from error


def run_of(table: Mapping[str, Any], base: Run | None = None) -> Run:
    """Return the run that a table describes: ``load_run`` for a file that was read already. Raises ConfigError."""
    run, wrong = read_run(table, base)
    if wrong:
        raise ConfigError([fault.text for fault in (*wrong, *field_faults(run))])
    return run


def read_run(table: Mapping[str, Any], base: Run | None = None) -> tuple[Run, list[FieldFault]]:
    """Return the run that a table describes, without its wrong fields, and their faults.

    Values that are only out of range are in the run, and no faults: ``check_run`` finds them.

    Raises:
        ConfigError: The run has functions of the user's own.
    """
    faults: list[FieldFault] = []
    rest, theirs = dict(table), None
    if is_theirs(_part(table, "model")):
        try:
            theirs = their_model_again(rest.pop("model"))
        except (TypeError, ValueError) as error:
            raise ConfigError([f"model: it can't be read again ({error}): give the run that was saved"]) from error
    own = {part: rest[part]["fn"] for part in ("model", "data") if "fn" in _part(rest, part)}
    if own:
        how = "a run with your own functions starts from Python, launch(run, resume=...)"
        raise ConfigError([f"{part}.fn is {short_repr(name)}: {how}" for part, name in own.items()])
    start = base or Run()
    if "recipe" in rest:
        with collected("", faults):
            start = run_of(recipe_table(str(rest.pop("recipe"))))
    if "layout" in rest:
        with collected("", faults):
            start = replace(start, **layout(str(rest.pop("layout"))))
    if theirs is not None:
        start = replace(start, model=theirs)
    run = _changed(start, rest, "", faults)
    if wrong := [fault for fault in field_faults(run) if fault.of_type]:
        run = _changed(start, _without(rest, [fault.path for fault in wrong]), "", [])
    return run, [*faults, *wrong]


def _without(table: Mapping[str, Any], paths: Sequence[str], below: str = "") -> dict[str, Any]:
    """Return a table without the fields of these paths, which may be those of items in a field."""
    kept: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{below}{key}"
        if path in paths:
            continue
        if isinstance(value, Mapping):
            kept[key] = _without(value, paths, f"{path}.")
        elif not any(f"{wrong}.".startswith(f"{path}.") for wrong in paths):
            kept[key] = value
    return kept


def _part(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = table.get(name)
    return part if isinstance(part, Mapping) else {}


def of_kind(name: str, kind: object, like: T) -> T:
    """Return a model, data or an optimizer of the given kind.

    Args:
        name: Field of the run: "model", "data" or "optim".
        kind: The kind, such as "llama" or "sgd".
        like: The present one. It is returned itself if it has that kind. Otherwise the fields common to all kinds are
            copied (a model's sizes, an optimizer's learning-rate schedule), and the others have their defaults.

    Raises:
        ConfigError: There is no such kind.
    """
    kinds = KINDS[name]
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError([f"{name}.kind is {short_repr(kind)}: use {' or '.join(map(repr, kinds))}"])
    if isinstance(like, kinds[kind]):
        return like
    common = {field: getattr(like, field, None) for field in _COMMON[name]}
    made: T = kinds[kind](**{field: value for field, value in common.items() if value is not None})
    return made


def _changed(base: T, table: Mapping[str, Any], below: str, faults: list[FieldFault]) -> T:
    """Return ``base`` with the fields that a table sets, and add its unknown keys to ``faults``."""
    assert is_dataclass(base) and not isinstance(base, type)
    hints = get_type_hints(type(base))
    names = [field.name for field in fields(base)]
    changes: dict[str, Any] = {}
    for key, value in table.items():
        path, old = f"{below}{key}", getattr(base, key, None)
        if key not in names:
            faults.append(FieldFault(path, f"{path} is not a field{_hint(key, names, below[:-1])}", of_type=True))
        elif old is None and isinstance(value, dict) and (kind := _table_of(hints[key])) is not None:
            changes[key] = _changed(kind(), value, f"{path}.", faults)
        elif not is_dataclass(old) or isinstance(old, Schedule) or (is_none(value) and _may_be_none(hints[key])):
            changes[key] = _plain(value, hints[key])
        elif path == "precision" and isinstance(value, str):
            changes[key] = Precision(compute=value)  # type: ignore[arg-type]  # field_faults checks it
        elif not isinstance(value, dict):
            text = f"{path} is {short_repr(value)}: write its fields in a table [{path}]"
            faults.append(FieldFault(path, text, of_type=True))
        else:
            inner = dict(value)
            if path == "model" and begins_in_folder(inner):
                with collected("model.hf", faults):
                    old = HF(inner["hf"], **{name: inner[name] for name in _SCALARS & inner.keys()})
            if path in KINDS and "kind" in inner:
                with collected(f"{path}.kind", faults):
                    old = of_kind(path, inner.pop("kind"), old)
            changes[key] = _changed(old, inner, f"{path}.", faults)
    return replace(base, **changes)


def begins_in_folder(model: Mapping[str, Any]) -> bool:
    """Return whether a model's table names a folder of Hugging Face and leaves fields to its config.json.

    A run that was written has all fields, so that it can be read where the folder is no more.
    """
    optional = {"hf", "moe", "rope_scaling", "lora"}
    folder, every = model.get("hf"), {field.name for field in fields(Transformer)} - optional
    return isinstance(folder, str) and folder != "none" and not every <= model.keys()


def _plain(value: Any, hint: Any) -> Any:
    """Convert a value from TOML: a list to a tuple, and "none" to None where the field's type allows None.

    A mapping is a table, or a list of pairs as ``_written`` makes it.
    """
    if isinstance(value, list):
        may_map = any(get_origin(kind) is Mapping for kind in (hint, *get_args(hint)))
        if may_map and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
            return {str(key): one for key, one in value}
        return tuple(value)
    return None if is_none(value) and _may_be_none(hint) else value


def _may_be_none(hint: Any) -> bool:
    return type(None) in get_args(hint)


def _table_of(hint: Any) -> type[Any] | None:
    """Return the class of a field that may be None or a table; None if it has none."""
    return next((kind for kind in get_args(hint) if _may_be_none(hint) and is_dataclass(kind)), None)  # type: ignore[return-value]


def _written(value: Any) -> Any:
    """Convert a value to plain data, the inverse of ``_plain``.

    A function becomes its name, a Schedule its CSV table, and a mapping a list of pairs.
    """
    if isinstance(value, Schedule):
        return {"csv": to_csv(value)}
    if is_dataclass(value):
        return {field.name: _written(getattr(value, field.name)) for field in fields(value)}
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else type(value).__name__
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return [[key, _written(one)] for key, one in value.items()]
    return [*value] if isinstance(value, tuple) else value


def _lines(table: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the lines of a table: its values, then the tables in it, each under its dotted path."""
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    lines = [f"{key} = {_spelled(value)}" for key, value in table.items() if key not in tables]
    for name, inner in tables.items():
        lines += ["", f"[{path}{name}]", *_lines(inner, f"{path}{name}.")]
    return lines


def _spelled(value: Any) -> str:
    """Return a value as TOML spells it: like JSON, except that TOML escapes DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _hint(key: str, names: Iterable[str], part: str) -> str:
    """Return the hint for an unknown key of a part of the run: which other kinds have it, or the nearest key."""
    if hint := kind_hint(part, key):
        return f" of this kind: {hint}"
    known, common = sorted(names), COMMON_NAMES.get(key)
    meant = common if common in known else key
    return ": " + did_you_mean(meant, known, f"known are {', '.join(known)}", spelled=repr, cutoff=0.5)


def kind_hint(part: str, key: str) -> str:
    """Say which kinds of a part of the run have a field, as "set data.kind to 'examples'"; "" if none has it."""
    having = [kind for kind, of in KINDS.get(part, {}).items() if key in {field.name for field in fields(of)}]
    return f"set {part}.kind to {' or '.join(map(repr, having))}" if having else ""
