"""Building HTML safely: every text is escaped when it becomes part of an element."""

from __future__ import annotations

from html import escape


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
    return Markup(f"<{name}{told}>{joined(*inside)}</{name}>")


def joined(*parts: str) -> Markup:
    """Concatenate parts; texts that are not Markup are escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


STYLE = Markup("""
:root { color-scheme: light dark; --page: #f3f4f6; --paper: #ffffff; --ink: #343a40; --soft: #5f6872; --line: #d9dde1;
  --one: #255d9d; --two: #c2410c; --fill: #4c84c4; --mark: #fff3bf; }
@media (prefers-color-scheme: dark) { :root { --page: #0d0f12; --paper: #16181d; --ink: #dee2e6; --soft: #9aa4ae;
  --line: #333942; --one: #6ea8e8; --two: #f59f58; --fill: #3b6ea8; --mark: #4a4013; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1rem 3rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 0 0 .75rem; }
header p, .note { color: var(--soft); margin: .25rem 0 1rem; overflow-wrap: anywhere; }
.note { margin: .5rem 0 0; font-size: .9rem; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 1rem 1.1rem;
  margin: 1rem 0 0; min-width: 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.2rem, 1fr)); gap: .6rem; }
.tile { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.2rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
.tile span { color: var(--soft); font-size: .85rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: 0 1rem; }
.wide { overflow-x: auto; }
.wide > svg { display: block; min-width: 44rem; }
.chart { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
.chart.broad { font-size: 10px; }
@media (max-width: 40rem) { .chart { font-size: 17px; } .chart.broad { font-size: 21px; } }
.chart text { fill: var(--soft); }
.chart .grid { stroke: var(--line); }
.chart .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.chart .hit { fill: var(--ink); fill-opacity: 0; }
.chart .hit:hover { fill-opacity: .1; }
.one { stroke: var(--one); color: var(--one); } .two { stroke: var(--two); color: var(--two); }
.chart circle { fill: currentColor; stroke: none; }
.key { display: flex; gap: 1.2rem; color: var(--soft); font-size: .85rem; }
.key i { display: inline-block; width: 1.1rem; height: 0; border-top: 3px solid currentColor; margin-right: .4rem;
  vertical-align: middle; }
.bar { display: grid; grid-template-columns: 5rem 1fr 6rem; gap: .75rem; align-items: center; margin: .35rem 0; }
.bar div { background: var(--page); border-radius: 4px; height: 1rem; }
.bar div div { background: var(--fill); }
.bar b, td.number { font-weight: 400; text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } th.number { text-align: right; } tr:last-child td { border-bottom: 0; }
.number + td, .number + th { padding-left: 1.2rem; }
td.value { overflow-wrap: anywhere; font-family: ui-monospace, monospace; font-size: .88rem; }
mark { background: var(--mark); color: inherit; border-radius: 3px; padding: 0 .25rem; }
pre { margin: 0; overflow-x: auto; }
""")
