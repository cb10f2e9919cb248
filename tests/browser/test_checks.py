"""What the checks of a page are there to find, each in a page that has it; and that a page without has no fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.browser import dead_links, examined

pytestmark = pytest.mark.long

SOUND = """<!doctype html><html lang="en"><head><meta charset="utf-8"><style>
:root { color-scheme: light dark } p { margin: 0 }
@media (prefers-color-scheme: dark) { .light-only { color: #333 } } .hidden { display: none; color: #fff }
</style></head><body><h1 id="top">A page</h1><p>Text. <a href="#top">Up</a></p><p class="hidden">Text</p>
<svg width="90" height="30"><rect width="90" height="30" fill="#205090"/><text y="20" fill="#fff">white</text></svg>
<pre style="overflow: auto">%s</pre>%%s</body></html>""" % ("code " * 99)
WIDE = "<tr>" + "<td>cell</td>" * 60 + "</tr>"
PAGES = {
    "sound": ("", None),
    "overflow": ('<div style="width: 500px">wide</div>', r"390 px: the page is 5\d\d px wide, not 390"),
    "cut": (f'<div style="overflow: hidden"><table>{WIDE}</table></div>', "1440 px: table .* is cut at"),
    "scrolls": (f'<div style="overflow: auto"><table>{WIDE}</table></div>', "390 px: table .* scrolls"),
    "code": (f'<div style="overflow: clip"><pre>{"code " * 99}</pre></div>', "1024 px: pre .* is cut at"),
    "squeezed": (
        '<table><tr><td style="max-width: 1px">seven words that are below each other</td></tr></table>',
        "1440 px: td .* has a word a line",
    ),
    "pale": ('<p style="color: #808080">grey</p>', "light: “grey” has contrast 3.95"),
    "faint": ('<p style="opacity: .5">half</p>', "light: “half” has contrast 3.9"),
    "light": ('<p class="light-only">dark</p>', "1440 px, dark: “dark” has contrast"),
    "folded": ('<details><p style="color: #999">below</p></details>', "“below” has contrast 2.85"),
    "label": ('<style>b::after { content: "tag"; color: #999 }</style><b>a</b>', "“tag” has contrast 2.85"),
    "drawn": (
        '<svg><rect width="90" height="30" fill="#205090"/><text y="20">on blue</text></svg>',
        "“on blue” has contrast 2.61: rgb.0, 0, 0. on 32,80,144",
    ),
    "cut text": ('<svg width="90"><text x="60">too long for it</text></svg>', "390 px: text .* is cut"),
    "console": ("<script>console.error('no such thing')</script>", "console: no such thing"),
    "script": ("<script>null.one</script>", "error of a script: Cannot read properties of null"),
    "picture": ('<img src="none.png" alt="">', "console: Failed to load resource"),
}


def test_each_check_finds_what_it_is_for(written):
    urls = {written(f"{name}.html", SOUND % body): fault for name, (body, fault) in PAGES.items()}
    for url, page in examined(urls).items():
        fault, said = urls[url], "\n".join(page.faults)
        assert not said if fault is None else re.search(fault, said), (url, said)
        assert len({re.sub(r"^\d+ px(, \w+)?: |\d", "", one) for one in page.faults}) <= 2, "no other faults"


def test_links_and_anchors_lead_somewhere(written):
    links = (
        "#top",
        "#gone",
        "two.html",
        "two.html#there",
        "two.html#top%20of",
        "none.html",
        "https://example.org/none",
    )
    one = written("one.html", SOUND % "".join(f'<a href="{link}">{link}</a> ' for link in links))
    two = written("two.html", SOUND % '<i id="there"></i>')
    dead = dead_links(examined([one, two], schemes=["light"]), Path("/"))
    assert [fault.rpartition("/")[2] for fault in dead[one]] == ["one.html#gone", "two.html#top%20of", "none.html"]
    assert dead[two] == []
