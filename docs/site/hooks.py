"""What mkdocs calls while it makes the site: search ranks the guides before the reference and the decisions."""

from __future__ import annotations

from typing import Any

_BOOST = {"reference": 0.2, "decisions": 0.2, "start.md": 4, "architecture.md": 0.5}  # by folder or page


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Give a page its weight in the search.

    Args:
        markdown: The text of the page, which stays as it is.
        page: The page, of mkdocs.
    """
    first = page.file.src_uri.partition("/")[0]
    page.meta.setdefault("search", {"boost": _BOOST.get(first, 2)})
    return markdown
