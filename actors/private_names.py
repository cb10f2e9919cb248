"""Private names of torch and Ray that have no substitute: they are there, or the import is refused in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from operator import attrgetter
from typing import Any

KNOWN_VERSIONS = {"torch": ">=2.10,<2.14", "ray": ">=2.59,<2.61"}  # as in pyproject.toml, and a test says so


def module_with(name: str, needed: Sequence[str]) -> Any:
    """Return a module in which some names are there.

    Args:
        name: Name of the module, of torch or of Ray.
        needed: The names, with dots for what is inside others.

    Raises:
        ImportError: The module or a name is missing. The error says which, and which versions are known to work.
    """
    try:
        module = import_module(name)
    except ImportError:
        missing = [name]
    else:
        missing = [f"{name}.{one}" for one in needed if not _is_there(module, one)]
        if not missing:
            return module
    package = name.partition(".")[0]
    version, known = getattr(import_module(package), "__version__", "here"), KNOWN_VERSIONS[package]
    raise ImportError(
        f"{package} {version} has no {' and no '.join(missing)}, which raypar needs: "
        f"pip install '{package}{known}', the versions that are known to work"
    )


def _is_there(module: object, name: str) -> bool:
    try:
        attrgetter(name)(module)
    except AttributeError:
        return False
    return True
