"""Pages in headless Chromium: what is wrong with them, at the widths of a desk, a tablet and a telephone."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urldefrag, urlsplit

CHECKS = (Path(__file__).parents[1] / "browser/checks.js").read_text(encoding="utf-8")
SIZES = ((1440, 900), (1024, 768), (390, 844))
SCHEMES = ("light", "dark")
READ_AT = (1440, 390)  # px: what is shown at 1024 is shown in the same colours at one of these
AT_ONCE = 3  # pages
PATIENCE = 45.0  # seconds for a page in all sizes and colours, some 3 of an idle machine


def chromium():
    """The path of Chromium or Chrome; None if neither is there."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass
class Page:
    """A page that was opened.

    Attributes:
        faults: What is wrong with it, as sentences.
        links: The addresses that its links lead to.
        anchors: What an address can have after its ``#``.
    """

    faults: list[str] = field(default_factory=list)
    links: Sequence[str] = ()
    anchors: Sequence[str] = ()


def examined(urls: Iterable[str], schemes: Sequence[str] = SCHEMES, ignored: str = "") -> Mapping[str, Page]:
    """Open pages, several at once, and look at each in all sizes and colours.

    Args:
        urls: Their addresses.
        schemes: The colours that the user prefers, "light" or "dark".
        ignored: A selector of CSS: what is in there is not looked at.
    """
    return asyncio.run(_examined(list(urls), schemes, ignored))


async def _examined(urls: list[str], schemes: Sequence[str], ignored: str) -> Mapping[str, Page]:
    from playwright.async_api import async_playwright

    found = {url: Page() for url in urls}
    waiting = iter(urls)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])

        async def take_turns():
            for url in waiting:
                found[url] = await _page(browser, url, schemes, ignored)

        await asyncio.gather(*(take_turns() for _ in range(min(AT_ONCE, len(urls)))))
        await browser.close()
    return found


async def _page(browser, url, schemes, ignored, tries=3):
    """Look at a page. On a busy machine a tab now and then answers no more: then another one is opened."""
    from playwright.async_api import Error

    tab, page = await browser.new_page(reduced_motion="reduce"), Page()
    try:
        await asyncio.wait_for(_look(tab, url, page, schemes, ignored), PATIENCE)
    except (TimeoutError, Error):
        if tries == 1:
            raise
        return await _page(browser, url, schemes, ignored, tries - 1)
    finally:
        with suppress(TimeoutError, Error):
            await asyncio.wait_for(tab.close(), PATIENCE)
    return page


async def _look(tab, url, page, schemes, ignored):
    """Fill in what a page has."""
    tab.on("console", lambda said: _is_error(said) and page.faults.append(f"console: {said.text}"))
    tab.on("pageerror", lambda error: page.faults.append(f"error of a script: {error}"))
    await tab.goto(url)
    await tab.evaluate(CHECKS)
    await tab.evaluate("checks.open()")
    for width, height in SIZES:
        await tab.set_viewport_size({"width": width, "height": height})
        page.faults += [f"{width} px: {fault}" for fault in await tab.evaluate("checks.layout", ignored)]
        for scheme in schemes if width in READ_AT else ():
            await tab.emulate_media(color_scheme=scheme)
            found = await tab.evaluate("checks.contrast", ignored)
            page.faults += [f"{width} px, {scheme}: {fault}" for fault in found]
    links = await tab.evaluate("checks.links()")
    page.links, page.anchors = links["links"], links["anchors"]


def _is_error(said):
    """Chromium asks for an icon of a picture by itself, which has none."""
    return said.type == "error" and not said.location["url"].endswith("/favicon.ico")


def dead_links(pages: Mapping[str, Page], folder: Path) -> dict[str, list[str]]:
    """{page: its links that lead nowhere, as faults}, of links to files of a folder, or to anchors of the pages.

    Args:
        pages: By address; all of one server, or files.
        folder: What is served at its root; ``/`` for files.
    """
    dead = {}
    for url, page in pages.items():
        dead[url] = [f"dead link: {link}" for link in page.links if not _leads_somewhere(link, pages, folder)]
    return dead


def _leads_somewhere(link: str, pages: Mapping[str, Page], folder: Path) -> bool:
    address, anchor = urldefrag(link)
    ours = {urlsplit(url)[:2] for url in pages}
    if urlsplit(address)[:2] not in ours:
        return True
    path = folder / unquote(urlsplit(address).path).lstrip("/")
    if not (path / "index.html" if path.is_dir() and path != folder.root else path).exists():
        return False
    known = pages.get(address)
    return not anchor or known is None or unquote(anchor) in known.anchors


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextmanager
def served(folder: Path):
    """Serve a folder on this machine; the address of its root."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
