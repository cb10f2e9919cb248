"""What opens pages: Chromium, from the system, through playwright."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests.support.browser import chromium


@pytest.fixture(scope="session", autouse=True)
def browser_is_there():
    """Without Chromium or playwright nothing here runs; where RAYPAR_BROWSER is "required", that is a failure."""
    missing = [] if chromium() else ["Chromium is not installed (Debian: apt-get install chromium)"]
    if importlib.util.find_spec("playwright") is None:
        missing.append("playwright is not installed (pip install 'raypar[dev]')")
    if missing:
        (pytest.fail if os.environ.get("RAYPAR_BROWSER") == "required" else pytest.skip)("; ".join(missing))


@pytest.fixture
def written(tmp_path):
    """A function that writes a page by name, and returns its address."""

    def write(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return (tmp_path / name).as_uri()

    return write
