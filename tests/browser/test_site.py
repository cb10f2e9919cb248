"""Every page and picture of the site that ``make docs`` builds, opened: the site is below RAYPAR_SITE."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.browser import dead_links, examined, served

pytestmark = pytest.mark.long

SITE = os.environ.get("RAYPAR_SITE")
PAGES = {"guides": 40, "reference": 9, "decisions": 15}  # more than so many each


def part_of(page):
    """The part of the site that a page, a path in it, belongs to."""
    return next((part for part in PAGES if part in page.parts), "guides")


@pytest.mark.skipif(SITE is None, reason="make test-browser builds the site and looks at it")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", PAGES)
def test_every_page_of_the_site(part):
    folder = Path(SITE)
    files = [*folder.rglob("*.html"), *folder.glob("*.svg"), *folder.glob("pictures/*.svg")]
    files = [one for one in files if part_of(one.relative_to(folder)) == part]
    with served(folder) as root:
        urls = [f"{root}{path.relative_to(folder).as_posix().removesuffix('index.html')}" for path in sorted(files)]
        pages = examined(urls)
        dead = dead_links(pages, folder)
    assert len(urls) > PAGES[part]
    found = [
        f"{url.removeprefix(root)}: {fault}" for url, page in pages.items() for fault in (*page.faults, *dead[url])
    ]
    assert not found, "\n" + "\n".join(found)
