"""Building HTML safely: every text is escaped when it becomes part of an element. What all pages share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from markupsafe import Markup

NUMBER, VALUE, BELOW = "number", "value", "below"  # CSS classes of table columns; the last is a line on a narrow page
COLORS = ("one", "two", "three", "four", "five", "six")  # of lines


def element(name: str, *inside: str, **attributes: object) -> Markup:
    """Make ``<name attribute="...">inside</name>``.

    Args:
        name: The tag.
        *inside: The content; texts that are not Markup are escaped.
        **attributes: The attributes. ``_`` becomes ``-``, a trailing ``_`` is dropped (``class_``), and None leaves the
            attribute out.

    Returns:
        The element.
    """
    spelled = [
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value)
        for key, value in attributes.items()
        if value is not None
    ]
    return Markup("<{}{}>{}</{}>").format(name, concatenated(*spelled), concatenated(*inside), name)


def concatenated(*parts: str) -> Markup:
    """Concatenate parts; texts that are not Markup are escaped."""
    return Markup("").join(parts)


def section(title: str, *inside: Markup) -> Markup:
    """Make a box with a title, and a name for links from it."""
    named = "-".join(re.findall(r"[a-z0-9]+", title.lower()))
    return element("section", element("h2", title), *inside, id=named)


def contents(body: Markup) -> Markup:
    """Make links to the boxes of a page."""
    found = re.findall(r'<section id="([^"]*)"><h2>(.*?)</h2>', body)
    return element(
        "nav", *(element("a", Markup(title), href=f"#{name}") for name, title in found), aria_label="contents"
    )


def script() -> Markup:
    """Return the script of all pages."""
    return Markup(Path(__file__).with_name("script.js").read_text("utf-8"))


def folded(title: str, *inside: Markup) -> Markup:
    """Make a part that is opened by its title."""
    return element("details", element("summary", title), *inside)


def note(text: str) -> Markup:
    """Make a paragraph of explanation."""
    return element("p", text, class_="note")


def html_table(heads: Sequence[str], rows: Iterable[Sequence[str]], kinds: Sequence[str]) -> Markup:
    """Make a table; ``kinds`` are the CSS classes of its columns."""
    head = element("tr", *(element("th", name, class_=kind or None) for name, kind in zip(heads, kinds, strict=True)))
    body = [
        element("tr", *(element("td", cell, class_=kind or None) for cell, kind in zip(row, kinds, strict=True)))
        for row in rows
    ]
    return element("div", element("table", head, *body), class_="scroll")


def document(title: str, body: Markup, every: int | None = None) -> str:
    """Make a whole page.

    Args:
        title: The title of the window.
        body: The content.
        every: Seconds after which the page loads itself again; None: never.

    Returns:
        The HTML.
    """
    head = element(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup() if every is None else Markup(f'<meta http-equiv="refresh" content="{every}">'),
        element("title", title),
        element("style", Markup(Path(__file__).with_name("style.css").read_text("utf-8"))),
    )
    return concatenated(
        Markup("<!DOCTYPE html>\n"),
        element("html", head, element("body", body, element("script", script())), lang="en"),
        Markup("\n"),
    )
