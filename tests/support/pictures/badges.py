"""Badges of the README from pyproject.toml: the version, what raypar needs, and its licence."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

from tests.support.pictures.templates import filled

_PROJECT = Path(__file__).parents[3] / "pyproject.toml"
_LETTER, _MARGIN, _GAP = 7, 14, 6  # pixels


class Badge(NamedTuple):
    """Two words beside each other, with the places of both in pixels."""

    name: str
    value: str
    left: int

    @property
    def middle(self) -> int:
        return self.left + len(self.name) * _LETTER + _MARGIN

    @property
    def right(self) -> int:
        return self.middle + len(self.value) * _LETTER + _MARGIN


def badges() -> str:
    """Return the badges of this project as one SVG."""
    project = tomllib.loads(_PROJECT.read_text())["project"]
    found = list[Badge]()
    for name, value in {
        "raypar": project["version"],
        "Python": _range(project["requires-python"]),
        **{name: _range(_needed(project, name)) for name in ("torch", "ray")},
        "licence": project["license"],
    }.items():
        found.append(Badge(name, value, found[-1].right + _GAP if found else 0))
    return filled("badges.svg.jinja", badges=found)


def _needed(project: dict[str, list[str]], name: str) -> str:
    (line,) = [line for line in project["dependencies"] if re.match(rf"{name}\W", line)]
    return line.removeprefix(name)


def _range(versions: str) -> str:
    """The versions that a requirement allows: ">=2.10,<2.14" is "2.10 to 2.13"."""
    least = re.findall(r">=(\d+\.\d+)", versions)[0]
    below = re.findall(r"<(\d+)\.(\d+)", versions)
    return f"{least} to {below[0][0]}.{int(below[0][1]) - 1}" if below else f"{least} or newer"
