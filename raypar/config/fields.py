"""Check that the fields of a run have their declared types and ranges, which a dataclass itself does not do.

pydantic does the check. It is imported only inside the functions that use it: to draw a schedule does not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from raypar.errors import ConfigError
from raypar.schedules.schedule import Schedule

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_RANGES = {
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
}
_WORDS = _RANGES | {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "tuple_type": "a tuple (in TOML a list)",
    "dict_type": "a dictionary",
    "missing": "longer",
    "too_short": "a list of {min_length} at least",
    "string_too_short": "a text of {min_length} or more characters",
    "too_long": "of {max_length} at most",
    "callable_type": "a function",
    "literal_error": "{expected}",
    "iterable_type": "a list",
    "sequence_str": "a list",
    "Predicate str.isprintable failed": "of characters that can be printed, without line ends and tabs",
    "Predicate is_size failed": "a number of bytes with its unit, as '8GiB' or '500MB'",
    "Predicate is_grid failed": "a grid of equal sides, as '2d:2x2', '2.5d:2x2x1' (depth last) or '3d:2x2x2'",
}
_OF_CLASS = {"dataclass_exact_type": "class_name", "is_instance_of": "class"}
_CLASSES = {
    "Action": "an Action, such as 1F0",
    "InjectedFault": "a fault, such as rp.chaos.kill('pp=1', at='1B3')",
    "PathLike": "a path",
    "Precision": "a Precision, such as rp.Precision('bf16')",
    "Resources": "Resources, such as rp.Resources(cpus=4, memory='8GiB')",
    "Run": "a Run, which rp.Run(...) makes, or rp.recipe('gpt-tiny')",
    "Sequence": "a list",
}
_BATCH = "batch, where def batch(step, microbatch, dp): returns (inputs, targets)"
_FUNCTIONS = {
    "model.fn": "lambda: [torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)]",
    "model.loss": "torch.nn.functional.mse_loss",
    "model.count": "lambda target: int((target != 0).sum())",
    "data.fn": _BATCH,
    "data.validate": _BATCH,
    "data.lengths": "lambda inputs, targets: (inputs != 0).sum(1)",
    "on": "print",
}
_DICTIONARIES = {
    "model.plan": "{'layers.0': 'column', 'layers.2': 'row'}",
    "model.metrics": "{'accuracy': lambda output, target: (output.argmax(1) == target).float().mean()}",
    "optim.rates": "{'head.*': 0.5}",
    "resources.custom": "{'fast_disk': 1}",
    "resources.labels": "{'region': 'us-west'}",
    "tile": "{'blocks.*.mlp.*': 8, 'head.out': 4}",
    "expert_order": "{'blocks.0.mlp.experts': '1 0'}",
}
_EXAMPLES = {"callable_type": _FUNCTIONS, "dict_type": _DICTIONARIES}  # by the error that asks for one, and the field


class FieldFault(NamedTuple):
    """A field with a wrong value.

    Attributes:
        path: Dotted path of the field, such as ``model.layers``, or of an item of a tuple; "" for the whole run.
        text: The sentence for the user.
        of_type: Whether the type is wrong. If not, the value is out of range.
    """

    path: str
    text: str
    of_type: bool


@contextmanager
def collected(path: str, faults: list[FieldFault]) -> Iterator[None]:
    """Add the faults of a ConfigError to ``faults``, as those of the field at ``path``, and go on."""
    try:
        yield
    except ConfigError as error:
        faults += [FieldFault(path, text, of_type=True) for text in error.faults]


def right_fields(wrong: Sequence[FieldFault]) -> Callable[..., bool]:
    """Return a function of paths: whether these fields, and all fields inside them, have none of these faults.

    Args:
        wrong: Faults. One of the whole run leaves no field right.
    """
    heads = [f"{fault.path}." if fault.path else "" for fault in wrong]

    def right(*paths: str) -> bool:
        pairs = ((f"{path}.", head) for path in paths for head in heads)
        return not any(one.startswith(other) or other.startswith(one) for one, other in pairs)

    return right


def field_faults(part: Any, below: str = "") -> Iterator[FieldFault]:
    """Yield the faults of a dataclass's fields, including those of nested dataclasses.

    The check is strict: True is not a number, 2.0 is not a whole number, and nan and inf are not finite numbers.

    Args:
        part: A dataclass instance.
        below: Prefix of the fields' paths, such as ``model.``.
    """
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    wrong = _errors(part.__class__, values)
    for name, value in values.items():
        if name in wrong:
            yield from _faults_of_field(wrong[name], f"{below}{name}", mapping=_has_keys(part.__class__, name, value))
        elif is_dataclass(value) and not isinstance(value, Schedule):  # a Schedule has its own check
            yield from field_faults(value, f"{below}{name}.")


def value_faults(kind: type, values: Mapping[str, Any]) -> Iterator[FieldFault]:
    """Yield the faults of values that are to be fields of a dataclass, as ``field_faults`` does, but not those inside.

    Args:
        kind: The dataclass.
        values: Values by the names of the fields. Fields without a value are not checked.
    """
    for name, errors in _errors(kind, values).items():
        if name in values:
            yield from _faults_of_field(errors, name, mapping=_has_keys(kind, name, values[name]))


def _errors(kind: type, values: Mapping[str, Any]) -> dict[Any, list[ErrorDetails]]:
    """Return pydantic's errors for the values of a dataclass's fields, by field."""
    from pydantic import ValidationError

    unlike = {name: value for name, value in values.items() if name in _whole(kind) and type(value) in (bool, float)}
    found: dict[Any, list[ErrorDetails]] = {
        name: [{"type": "int_type", "loc": (name,), "msg": "", "input": value}] for name, value in unlike.items()
    }
    try:
        _strict(kind)(**values)
    except ValidationError as error:
        return found | {name: list(same) for name, same in groupby(error.errors(), key=lambda one: one["loc"][0])}
    return found


@cache
def _whole(kind: type) -> frozenset[str]:
    """Return the fields whose type is a Literal of whole numbers; pydantic would also take True or 1.0 for 1."""

    def numbers(hint: Any) -> bool:
        values = get_args(hint)
        if get_origin(hint) is Literal:
            return all(type(value) is int for value in values)
        return any(map(numbers, values))

    return frozenset(name for name, hint in get_type_hints(kind).items() if numbers(hint))


def _has_keys(kind: type, name: str, value: Any) -> bool:
    """Return whether a field takes dictionaries, and has one."""

    def takes(hint: Any) -> bool:
        return get_origin(hint) is Mapping or any(map(takes, get_args(hint)))

    return isinstance(value, Mapping) and takes(get_type_hints(kind)[name])


def short_repr(value: Any) -> str:
    """Return the repr of a value, shortened to 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"a value of type {type(value).__name__} that is too long to write"
    return text if len(text) <= 80 else f"{text[:77]}..."


@cache
def _strict(kind: type) -> type:
    """Return a pydantic dataclass with the fields of ``kind``. Creating an instance checks the fields strictly."""
    from pydantic import ConfigDict
    from pydantic.dataclasses import dataclass

    return dataclass(
        kind, config=ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True), frozen=True
    )


def _faults_of_field(errors: list[ErrorDetails], path: str, *, mapping: bool) -> Iterator[FieldFault]:
    """Yield the faults of one field.

    pydantic reports an error for each member of a union. They become one sentence, and only the most specific ones are
    used: a value out of range, or a wrong item of a tuple or a mapping.
    """

    def items(error: ErrorDetails) -> str:
        if mapping:
            keys = [key for key in error["loc"][1:] if not str(key).startswith(("dict[", "[key]"))]
            return "".join(f"[{key!r}]" for key in keys[:1])
        return "".join(f".{index}" for index in error["loc"] if isinstance(index, int))

    near = [error for error in errors if error["type"] in _RANGES] or errors
    deepest = [error for error in near if items(error)] or near
    for inner, same in groupby(deepest, key=items):
        group = list(same)
        words = [_word_of(error) for error in group]
        of_type = any(error["type"] not in _RANGES for error in group)
        text = f"{path}{inner} is {short_repr(group[0]['input'])}: it must be {' or '.join(words)}"
        asks_for = {error["type"] for error in group}
        examples = (of_field.get(path) for kind, of_field in _EXAMPLES.items() if kind in asks_for)
        text += next((f", such as {example}" for example in examples if example), "")
        yield FieldFault(path if mapping else f"{path}{inner}", text, of_type)


def _word_of(error: ErrorDetails) -> str:
    """Return what a value must be, with the article of a class's name: an AdamW, an SGD, a GPT."""
    of_class = error.get("ctx", {}).get(_OF_CLASS.get(error["type"], ""))
    if of_class is None:
        message = error["msg"].replace("'", "")  # some versions of pydantic quote the name of a predicate
        return (_WORDS.get(error["type"]) or _WORDS.get(message, error["msg"])).format(**error.get("ctx", {}))
    return _CLASSES.get(of_class) or f"{'an' if of_class.startswith(('A', 'E', 'SGD')) else 'a'} {of_class}"
