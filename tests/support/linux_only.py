"""Which names of the standard library Linux has and macOS lacks, as typeshed says, which mypy brings along."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import mypy

MODULES = ("fcntl", "mmap", "os", "resource", "select", "signal", "socket", "time")
_STUBS = Path(mypy.__file__).parent / "typeshed" / "stdlib"


def linux_only_names() -> dict[str, list[str]]:
    """Return by module the names that Linux has and macOS lacks."""
    return {module: sorted(_names(module, "linux") - _names(module, "darwin")) for module in MODULES}


def _names(module: str, platform: str) -> set[str]:
    path = _STUBS / f"{module}.pyi"
    path = path if path.exists() else _STUBS / module / "__init__.pyi"
    return set(_defined(ast.parse(path.read_text()).body, platform))


def _defined(body: list[ast.stmt], platform: str) -> Iterator[str]:
    for node in body:
        match node:
            case ast.If():
                yield from _defined(node.body if _holds(node.test, platform) else node.orelse, platform)
            case ast.FunctionDef() | ast.ClassDef():
                yield node.name
            case ast.AnnAssign(target=ast.Name(name)):
                yield name
            case ast.Assign(targets=[ast.Name(name)]):
                yield name
            case ast.ImportFrom():
                yield from (alias.asname or alias.name for alias in node.names)


def _holds(test: ast.expr, platform: str) -> bool:
    """Return whether a condition of a stub holds: one of the system, or of the version of Python."""
    seen = SimpleNamespace(platform=platform, version_info=sys.version_info)
    return bool(eval(compile(ast.Expression(test), "stub", "eval"), {"sys": seen, "TYPE_CHECKING": True}))
