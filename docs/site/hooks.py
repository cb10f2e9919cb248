"""What mkdocs calls while it makes the site.

Search ranks the guides before the reference and the decisions. The first page of the reference links every name. In
tables GitHub wants `a\\|b` for a bar in code, where Python-Markdown shows the backslash.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_BOOST = {  # by folder or page; 2 for the others
    "reference": 0.01,
    "decisions": 0.01,
    "architecture.md": 0.1,
    "questions.md": 0.5,
    "install.md": 1,
    "start.md": 8,
}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Give a page its weight in the search, its tables their bars, and the reference's first page its links.

    Args:
        markdown: The text of the page.
        page: The page, of mkdocs.

    Returns:
        The text, without backslashes in tables' code, and on the reference's first page with names as links.
    """
    first = page.file.src_uri.partition("/")[0]
    page.meta.setdefault("search", {"boost": _BOOST.get(first, 2)})
    markdown = re.sub(r"^\|.*", lambda row: _without_backslashes(row[0]), markdown, flags=re.MULTILINE)
    if page.file.src_uri != "reference/index.md":
        return markdown
    folder = Path(page.file.abs_src_path).parent
    return re.sub(r"^\| \[.*?\]\((\w+\.md)\) .*$", lambda row: _linked(row, folder), markdown, flags=re.MULTILINE)


def _without_backslashes(row: str) -> str:
    return re.sub(r"`[^`]+`", lambda code: code[0].replace("\\|", "|"), row)


def _linked(row: re.Match[str], folder: Path) -> str:
    """Return a row of a table, in which each name that its page describes is a link to it."""
    text, page = row[0], row[1]
    for path in re.findall(r"^::: (\S+)$", (folder / page).read_text(), re.MULTILINE):
        name = path.rpartition(".")[2]
        text = text.replace(f"`{name}`", f"[`{name}`]({page}#{path})")
    return text
