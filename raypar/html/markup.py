"""HTML that can't be broken by what it shows: text is escaped wherever it becomes part of an element."""

from __future__ import annotations

from html import escape


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(name: str, *inside: str, **attributes: object) -> Markup:
    """``<name attribute="...">inside</name>``; what is no Markup yet is escaped. ``_`` in an attribute is ``-``, and a
    closing one is left out: ``class_``."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{told}>{joined(*inside)}</{name}>")


def joined(*parts: str) -> Markup:
    """The parts one after the other, escaped if they are no Markup yet."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))
