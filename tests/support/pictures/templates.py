"""The templates beside this file, filled."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_FILES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)


def filled(name: str, **values: object) -> str:
    """Return a template with its values, which are escaped."""
    return _FILES.get_template(name).render(values)
