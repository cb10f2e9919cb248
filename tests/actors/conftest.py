"""What several files of this folder ask for."""

from __future__ import annotations

import pytest

from raypar.actors.layers import linear as products
from tests.support.counted import Counted


@pytest.fixture
def counted(monkeypatch):
    """oneDNN's products, counted; without oneDNN there is nothing to test."""
    counted = Counted()
    if counted.really is None:
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "_ONEDNN", counted)
    return counted
