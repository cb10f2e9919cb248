"""Building HTML safely: every text is escaped when it becomes part of an element. What all pages share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

NUMBER, VALUE = "number", "value"  # CSS classes of table columns
COLORS = ("one", "two", "three", "four", "five", "six")  # of lines


class Markup(str):
    """A text that is HTML already."""

    __slots__ = ()


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
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{told}>{concatenated(*inside)}</{name}>")


def concatenated(*parts: str) -> Markup:
    """Concatenate parts; texts that are not Markup are escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def section(title: str, *inside: Markup) -> Markup:
    """Make a box with a title."""
    return element("section", element("h2", title), *inside)


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
        element("style", STYLE),
    )
    return concatenated(
        Markup("<!DOCTYPE html>\n"), element("html", head, element("body", body), lang="en"), Markup("\n")
    )


STYLE = Markup("""
:root { color-scheme: light dark; --page: #f3f4f6; --paper: #ffffff; --ink: #343a40; --soft: #5f6872; --line: #d9dde1;
  --one: #255d9d; --two: #c2410c; --three: #2b7a3d; --four: #8a3fa8; --five: #8a6100; --six: #0b7285;
  --fill: #4c84c4; --mark: #fff3bf; --bad: #c92a2a; }
@media (prefers-color-scheme: dark) { :root { --page: #0d0f12; --paper: #16181d; --ink: #dee2e6; --soft: #a7b0b9;
  --line: #333942; --one: #6ea8e8; --two: #f59f58; --three: #69c17d; --four: #cf9be6; --five: #d9b44a; --six: #4dc0d4;
  --fill: #3b6ea8; --mark: #4a4013; --bad: #ff8787; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 3rem; background: var(--page); color: var(--ink);
  font: 14px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 .75rem; overflow-wrap: anywhere; }
header p, .note { color: var(--soft); margin: .25rem 0 1rem; overflow-wrap: anywhere; }
.note { margin: .5rem 0 0; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 1rem 1.1rem;
  margin: 1rem 0 0; min-width: 0; }
ul { margin: 0; padding-left: 1.2rem; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--soft); margin-top: .75rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .6rem; }
.tile { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: .6rem .8rem; }
.tile b { display: block; font-size: 18px; font-variant-numeric: tabular-nums; white-space: nowrap; }
.tile span { color: var(--soft); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: 0 1rem; }
.wide, .scroll { overflow-x: auto; }
.wide > svg { display: block; max-width: none !important; }
.chart { display: grid; grid-template-columns: 4.6rem minmax(0, 1fr); color: var(--soft);
  font-variant-numeric: tabular-nums; }
.scale, .plot, .steps { position: relative; }
.scale span { position: absolute; right: .5rem; transform: translateY(-50%); white-space: nowrap; }
.steps { grid-column: 2; height: 3.2rem; border-top: 1px solid var(--line); margin-right: 1.2rem; }
.steps span { position: absolute; top: .15rem; transform: translateX(-50%); }
.steps b { position: absolute; top: 1.5rem; width: 100%; text-align: center; font-weight: 400; }
.plot { margin-right: 1.2rem; }
.plot svg { display: block; width: 100%; height: 200px; overflow: visible; }
.plot svg * { vector-effect: non-scaling-stroke; }
.sign { position: absolute; top: -.9rem; transform: translateX(-50%); cursor: help; }
.grid { stroke: var(--line); } .grid.resume, .grid.failure { stroke: currentColor; stroke-dasharray: 3 4; }
.resume { color: var(--soft); } .failure { color: var(--bad); }
.line, .dot { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
.dot { stroke-width: 6; stroke-linecap: round; }
.line.faint { stroke-width: 1; } .faint { opacity: .45; } .dot.faint { stroke-width: 4; }
h3 { font-size: 14px; font-weight: 600; margin: 1rem 0 .4rem; }
.heat { display: grid; grid-template-columns: 7rem minmax(0, 1fr); color: var(--soft); }
.heat .names { position: relative; font-size: 12px; line-height: 1.1rem; }
.heat .names span { position: absolute; right: .5rem; max-width: 6.5rem; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; }
.heat svg { display: block; width: 100%; }
.heat .ends { grid-column: 2; display: flex; justify-content: space-between; font-size: 12px; }
.heat .ground { fill: var(--line); fill-opacity: .35; }
.cell { stroke: var(--paper); stroke-width: 1; vector-effect: non-scaling-stroke; }
.cell.bad { fill: var(--bad); } .cell.one { fill: var(--one); }
.shades { margin-top: 1rem; } .shades > span { display: flex; flex-wrap: wrap; gap: .2rem .9rem; align-items: center; }
.shades b { min-width: 5rem; font-weight: 600; } .key .shade { width: .9rem; height: .9rem; border: 0;
  margin-right: .35rem; border-radius: 2px; }
.shade.bad { background: var(--bad); } .shade.one { background: var(--one); }
.hit { fill: var(--ink); fill-opacity: 0; }
.hit:hover { fill-opacity: .1; }
.one { color: var(--one); } .two { color: var(--two); } .three { color: var(--three); } .four { color: var(--four); }
.five { color: var(--five); } .six { color: var(--six); }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; color: var(--soft); overflow-wrap: anywhere; }
.key > span > span { margin-right: .4rem; }
.key i { display: inline-block; width: 1.1rem; height: 0; border-top: 3px solid currentColor; vertical-align: middle; }
.key .faint i { border-top-width: 1px; }
table .key { display: inline; color: inherit; } table .key > span { margin-right: .4rem; }
.bar { display: grid; grid-template-columns: minmax(5rem, 10rem) 1fr 6rem; gap: .75rem; align-items: center;
  margin: .35rem 0; }
.bar div { background: var(--page); border-radius: 4px; height: 1rem; }
.bar div div { background: var(--fill); }
.bar b, td.number { font-weight: 400; text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } th.number { text-align: right; } tr:last-child td { border-bottom: 0; }
.number + td, .number + th { padding-left: 1.2rem; }
td.name { white-space: nowrap; }
td.value { overflow-wrap: anywhere; min-width: 5rem; font-variant-numeric: tabular-nums; }
mark { background: var(--mark); color: inherit; border-radius: 3px; padding: 0 .25rem; }
""")
