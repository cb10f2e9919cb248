"""Check the arguments of public functions against their annotations, before anything inside them fails."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Mapping
from dataclasses import make_dataclass
from functools import cache, wraps
from inspect import Parameter, signature
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, get_type_hints

from raypar.actors.plain_value import plain_value
from raypar.config.fields import value_faults
from raypar.errors import ConfigError
from raypar.schedules.nearest_name import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_signature_of = cache(signature)
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def checked_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function, so that wrong arguments raise one sentence each, with the fix, before the function begins.

    An annotation says the type, and with the types of ``actors/bounds.py`` the range. A name in it that only type
    checkers import allows any value. Arguments of ``*args`` and ``**kwargs`` are not checked.

    Raises (when the function is called):
        TypeError: There is no argument of this name, or one is missing or too many.
        ConfigError: Arguments have wrong types or values; a ValueError that lists all.
    """

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        _demand(function, args, kwargs)
        return function(*args, **kwargs)

    return checked


def checked_methods(cls: type[T]) -> type[T]:
    """Decorate a class, so that the arguments of its public methods are checked; see ``checked_arguments``."""
    for name, member in [*vars(cls).items()]:
        if isinstance(member, FunctionType) and not name.startswith("_") and len(signature(member).parameters) > 1:
            setattr(cls, name, checked_arguments(member))
    return cls


def _demand(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    takes = _signature_of(function)
    known = [name for name, parameter in takes.parameters.items() if parameter.kind in _NAMED]
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in takes.parameters.values())
    unknown = [] if takes_any else [name for name in kwargs if name not in known]
    if unknown:
        raise TypeError("\n".join(_unknown(function.__name__, name, known) for name in unknown))
    kind = _arguments_of(function)
    try:
        bound = takes.bind(*args, **kwargs)
    except TypeError as error:  # one is missing, or they are too many
        raise TypeError(f"{function.__name__}: {error}") from None
    given = {name: plain_value(value) for name, value in bound.arguments.items() if name in kind.__annotations__}
    ConfigError.raise_if(f"{function.__name__}: {fault.text}" for fault in value_faults(kind, given))


def _unknown(function: str, name: str, names: list[str]) -> str:
    """Return the fault of an unknown argument, with the nearest known one."""
    known = [one for one in names if one != "self"]
    guess = did_you_mean(name, known, f"it has {', '.join(known)}")
    return f"{function} has no argument {name!r}: {guess}"


@cache
def _arguments_of(function: Callable[..., Any]) -> type[Any]:
    """Return a dataclass whose fields are the annotated arguments of a function."""
    hints = get_type_hints(function, {}, _Names(function.__module__), include_extras=True)
    named = [name for name, parameter in _signature_of(function).parameters.items() if parameter.kind in _NAMED]
    return make_dataclass(function.__name__, [(name, hints[name]) for name in named if name in hints], frozen=True)


class _Names(dict[str, Any]):
    """The names in a module's annotations, with their types; for a named tuple only its instances fit, no lists."""

    def __init__(self, module: str) -> None:
        self._known = vars(builtins) | vars(sys.modules[module])

    def __missing__(self, name: str) -> Any:
        from pydantic import InstanceOf

        found = self._known.get(name, Any)  # a name that only type checkers import allows any value
        instances: Any = InstanceOf
        return instances[found] if hasattr(found, "_fields") and isinstance(found, type) else found
