"""The pictures in docs/pictures: up to date, on a page, and described."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.pictures.diagrams import pictures

FOLDER = Path(__file__).parents[1] / "docs/pictures"
DRAWN = pictures()
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_what_the_script_draws_and_says_what_it_shows(name):
    assert (FOLDER / name).read_text(encoding="utf-8") == DRAWN[name](), "run make pictures"
    root = ElementTree.fromstring(DRAWN[name]())
    assert (root.get("role"), root.get("width")) == ("img", "100%")
    assert root.find(f"{SVG}title").text and root.find(f"{SVG}desc").text
    assert "prefers-color-scheme: dark" in root.find(f"{SVG}style").text


def test_all_pictures_are_on_a_page_and_all_that_pages_show_are_drawn():
    pages = [page.read_text(encoding="utf-8") for page in FOLDER.parent.glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"!\[[^\]]{10,}\]\(pictures/([\w-]+\.svg)\)", page)}
    assert shown == set(DRAWN) == {path.name for path in FOLDER.glob("*.svg")}


def test_make_pictures_makes_them():
    assert "$(python) -m tests.support.pictures " in (FOLDER.parents[1] / "Makefile").read_text()
