"""Every page and picture of the site that ``make docs`` builds, opened: the site is below RAYPAR_SITE."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.browser import dead_links, examined, served

pytestmark = pytest.mark.long

SITE = os.environ.get("RAYPAR_SITE")


@pytest.mark.skipif(SITE is None, reason="make test-browser builds the site and looks at it")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["guides", "decisions"])
def test_every_page_of_the_site(part):
    folder = Path(SITE)
    files = [*folder.rglob("*.html"), *folder.glob("*.svg"), *folder.glob("pictures/*.svg")]
    files = [one for one in files if ("decisions" in one.relative_to(folder).parts) == (part == "decisions")]
    with served(folder) as root:
        urls = [f"{root}{path.relative_to(folder).as_posix().removesuffix('index.html')}" for path in sorted(files)]
        pages = examined(urls)
        dead = dead_links(pages, folder)
    assert len(urls) > (15 if part == "decisions" else 45)
    found = [
        f"{url.removeprefix(root)}: {fault}" for url, page in pages.items() for fault in (*page.faults, *dead[url])
    ]
    assert not found, "\n" + "\n".join(found)
