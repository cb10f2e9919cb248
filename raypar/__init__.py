"""raypar: train PyTorch models in parallel with Ray actors.

``import raypar`` starts nothing and imports neither torch nor ray. Each name is imported when it is first used, from
where __init__.pyi says.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

_SOURCE_OF = {
    alias.asname: (line.module, alias.name)
    for line in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(line, ast.ImportFrom)
    for alias in line.names
}

__all__ = sorted(_SOURCE_OF)


def __getattr__(name: str) -> object:
    if name not in _SOURCE_OF:
        raise AttributeError(f"module 'raypar' has no attribute {name!r}{_meant(name)}")
    module, there = _SOURCE_OF[name]
    return getattr(importlib.__import__(module, fromlist=[there]), there)  # a module, too


def _meant(name: str) -> str:
    """Name the nearest public name, if one is near."""
    from raypar.schedules.nearest_name import nearest  # only after a mistake

    meant = None if name.startswith("_") else nearest(name, __all__)
    return "" if meant is None else f": it has {meant!r}"


def __dir__() -> list[str]:
    return sorted([*globals(), *_SOURCE_OF])
