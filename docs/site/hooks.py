"""What mkdocs calls while it makes the site: search ranks the guides before the reference and the decisions."""

from __future__ import annotations

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
    """Give a page its weight in the search.

    Args:
        markdown: The text of the page, which stays as it is.
        page: The page, of mkdocs.
    """
    first = page.file.src_uri.partition("/")[0]
    page.meta.setdefault("search", {"boost": _BOOST.get(first, 2)})
    return markdown
