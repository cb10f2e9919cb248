"""Find modules in a layer by patterns of their names, and replace them wherever a module refers to them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from raypar.schedules.nearest_name import near

_OWN = vars(nn.Module()).keys() - {"_parameters"}  # what torch keeps in every module


def modules_named(layer: nn.Module, name: str, pattern: str) -> list[tuple[str, nn.Module]]:
    """Return the modules of a layer whose logical name matches a pattern.

    Args:
        layer: The layer.
        name: Logical name of the layer.
        pattern: Names joined by dots; in each part "*" and "[qkv]" are as in file names.

    Returns:
        Pairs of a module's first name inside the layer ("" for the layer) and the module. A module with several
        names in the layer is returned once, if any of them matches.
    """
    head = ".".join(pattern.split(".")[: name.count(".") + 1])
    if not matches_pattern(name, head):
        return []  # no module in it matches either
    every = layer.named_modules(prefix=name, remove_duplicate=False)
    matching = {id(module) for path, module in every if matches_pattern(path, pattern)}
    return [(inner, module) for inner, module in layer.named_modules() if id(module) in matching] if matching else []


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a logical name matches a pattern, part by part."""
    parts = name.split("."), pattern.split(".")
    return len(parts[0]) == len(parts[1]) and all(map(fnmatchcase, *parts))


def names_near(pattern: str, names: Iterable[str]) -> str:
    """Suggest up to three patterns: names with the pattern's last part, or else the most similar names.

    Args:
        pattern: A pattern that matches no name.
        names: Logical names. Numbers in them are replaced by ``*``.

    Returns:
        A phrase for a message, such as "'layers.*.up' or 'layers.*.down'".
    """
    every = list(dict.fromkeys(map(starred, names)))
    alike = [name for name in every if name.rpartition(".")[2] == pattern.rpartition(".")[2]]
    alike = alike or near(starred(pattern), every) or every
    return " or ".join(map(repr, alike[:3]))


def starred(name: str) -> str:
    """Return a logical name with its numbers replaced by ``*``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def replace_modules(root: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules wherever a module under ``root`` refers to them.

    These are children, and attributes that are the module itself or a list, tuple or dict with it. Hooks, buffers,
    children and the user's attributes of the old module go over to the new one, whose own parameters stay.

    Args:
        root: A module that contains the old modules, and is none of them.
        replacements: The new module for each old one.
    """
    if not replacements:
        return
    for old, new in replacements.items():
        _carry_over(old, new)
    for parent in list(root.modules()):
        for table in (parent._modules, vars(parent)):
            for key, value in list(table.items()):
                if key not in _OWN and (found := _replaced(value, replacements)) is not value:
                    table[key] = found


def _carry_over(old: nn.Module, new: nn.Module) -> None:
    for name, value in vars(old).items():
        if name == "_parameters":
            continue
        if name not in vars(new):
            vars(new)[name] = value
        elif name in _OWN and isinstance(value, dict) and value is not vars(new)[name]:
            own, present = vars(new)[name], dict(vars(new)[name])
            own.clear()  # in place: the handles of hooks refer to the dict
            own.update({**value, **present})
        elif name in _OWN:
            vars(new)[name] = value


def _replaced(value: Any, replacements: Mapping[nn.Module, nn.Module]) -> Any:
    """Return a value with modules replaced; lists and dicts are changed in place."""
    if isinstance(value, nn.Module):
        return replacements.get(value, value)
    if isinstance(value, dict):
        value.update({key: _replaced(one, replacements) for key, one in value.items() if _is_key(one, replacements)})
    elif isinstance(value, list):
        value[:] = [_replaced(one, replacements) if _is_key(one, replacements) else one for one in value]
    elif type(value) is tuple and any(_is_key(one, replacements) for one in value):
        return tuple(replacements.get(one, one) if isinstance(one, nn.Module) else one for one in value)
    return value


def _is_key(value: Any, replacements: Mapping[nn.Module, nn.Module]) -> bool:
    return isinstance(value, nn.Module) and value in replacements
