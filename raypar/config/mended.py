"""Replace wrong fields of a run by valid values, so that the rules between fields can be checked as well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.data import Batches, Examples
from raypar.actors.specs.precision import LossScale, Precision
from raypar.actors.specs.resources import Resources
from raypar.actors.specs.run import Run
from raypar.config.fields import FieldFault, value_faults

# Values that are tried besides a field's default; those that the field does not allow are skipped.
_OTHERS: tuple[Any, ...] = (2, 1, 3, 0.5, 0.25, 1.5, "2", "8GiB", True, False, None, ())
_PARTS: tuple[Any, ...] = (
    Mesh(pp=2, dp=2, cp=2, tp=2),
    Precision("bf16"),
    LossScale("on"),
    Batches(lambda step, microbatch, dp: ((), ())),
    Examples("2"),
    Resources(2.0),
)
_SEVERAL: tuple[Any, ...] = ({"embed.*": 1.0}, {"embed.*": "0"}, ("embed.*",), (0.5, 0.5), (1, 1))
_FUNCTIONS = ("data.fn", "data.validate", "data.lengths", "data.path")  # if one is wrong, all of data is replaced


def mended(run: Run, wrong: Sequence[FieldFault]) -> tuple[Run, Run] | None:
    """Return a run twice, with two different valid values instead of each wrong one.

    A fault of both, in the same words, does not depend on the wrong fields.

    Args:
        run: The run.
        wrong: Its faults of single fields.

    Returns:
        The two runs; None if two valid values of a field are not known, as of a function of the user.
    """
    one = other = run
    for path in dict.fromkeys(_field_of(run, fault.path) for fault in wrong):
        values = _sound(run, path)
        if values is None and path in _FUNCTIONS:
            path = "data"
            values = _sound(run, path)
        if values is None:
            return None
        one, other = changed(one, path, values[0]), changed(other, path, values[1])
    return one, other


def changed(run: Any, path: str, value: Any) -> Any:
    """Return a dataclass, such as a run, with another value of one field.

    Args:
        run: The dataclass.
        path: Path of the field, such as ``model.layers``.
        value: The value.
    """
    head, _, rest = path.partition(".")
    return replace(run, **{head: changed(getattr(run, head), rest, value) if rest else value})


def value_at(part: Any, path: str) -> Any:
    """Return the value of a field or property, as ``mesh.tp``, None if a part has no such field.

    Args:
        part: The dataclass, such as a run.
        path: Path of the field.
    """
    for name in path.split("."):
        part = getattr(part, name, None)
    return part


def _field_of(run: Run, path: str) -> str:
    """Return the path of a field, given that of an item of its tuple or dictionary."""
    part: Any = run
    names = list[str]()
    for name in path.partition("[")[0].split("."):
        names.append(name)
        part = getattr(part, name, None)
        if not is_dataclass(part):
            break
    return ".".join(names)


def _sound(run: Run, path: str) -> tuple[Any, Any] | None:
    """Return two valid values of a field, the default first; None if they are not known."""
    head, _, name = path.rpartition(".")
    part = value_at(run, head) if head else run
    field = {one.name: one for one in fields(part)}.get(name)
    if field is None or (field.default is MISSING and field.default_factory is MISSING):
        return None
    usual = field.default if field.default_factory is MISSING else field.default_factory()
    words = [*_words(get_type_hints(type(part))[name])]
    pool = [*words, *((word,) for word in words), *_OTHERS, (2,) * _ranks(run), *_PARTS, *_SEVERAL]
    others = (value for value in pool if value != usual and not [*value_faults(type(part), {name: value})])
    return next(((usual, value) for value in others), None)


def _ranks(run: Run) -> int:
    """Return the number of pipeline ranks, or 1 if it is none."""
    return run.mesh.pp if isinstance(run.mesh, Mesh) and type(run.mesh.pp) is int and 1 < run.mesh.pp <= 64 else 1


def _words(hint: Any) -> Iterator[Any]:
    """Yield the values of a field's Literal, and default instances of dataclasses in its type."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        needed = (one for one in fields(hint) if one.default is MISSING and one.default_factory is MISSING)
        if not any(needed):
            yield hint()
    for inner in get_args(hint):
        yield from _words(inner)
