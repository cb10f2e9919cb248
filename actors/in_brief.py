"""A configuration in a line: what differs from the defaults."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from raypar.schedules.schedule import Schedule


def in_brief(spec: Any, *, sizes: bool = True) -> str:
    """Spell a configuration by what is not its default: "GPT(layers=8, hidden=32)".

    Args:
        spec: The configuration, a dataclass.
        sizes: Whether whole numbers are spelled too where they are the default, as the sizes of a model.
    """
    settings = changed_settings(spec, sizes=sizes)
    return f"{type(spec).__name__}({', '.join(f'{name}={value}' for name, value in settings.items())})"


def changed_settings(spec: Any, always: Collection[str] = (), *, sizes: bool = False) -> dict[str, str]:
    """Return the settings that are not the default, by name, as texts.

    Args:
        spec: The configuration, a dataclass.
        always: The names of those that are there in any case; of a model with its sizes.
        sizes: As for ``in_brief``.
    """
    found = {}
    for each in fields(spec):
        value = getattr(spec, each.name)
        usual = each.default if each.default_factory is MISSING else each.default_factory()
        is_size = sizes and isinstance(value, int) and not isinstance(value, bool)
        if isinstance(value, Schedule):
            found[each.name] = value.title
        elif is_dataclass(value) and (sizes or each.name in always or value != usual):
            found[each.name] = in_brief(value, sizes=sizes or each.name == "model")
        elif callable(value):
            found[each.name] = getattr(value, "__qualname__", type(value).__name__)
        elif value != usual or is_size or each.name in always:
            found[each.name] = repr(value)
    return found
