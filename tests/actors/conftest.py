"""What several files of this folder ask for."""

from __future__ import annotations

import pytest

from raypar.actors.autograd import torch_private
from tests.support.counted import Counted


@pytest.fixture
def counted(monkeypatch):
    """oneDNN's products, counted; without oneDNN there is nothing to test."""
    counted = Counted()
    if counted.really is None:
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(torch_private, "_ONEDNN_LINEAR", counted)
    return counted
