"""What several files of this folder ask for."""

from __future__ import annotations

import pytest

from raypar.actors.autograd import torch_private
from raypar.actors.specs import worlds
from tests.support.counted import Counted


@pytest.fixture
def cut(monkeypatch):
    """A function that sets the ZeRO levels at which replicas divide the elements of every weight; before, none do."""
    monkeypatch.setattr(worlds, "CUT_LEVELS", frozenset())

    def switch(*levels):
        monkeypatch.setattr(worlds, "CUT_LEVELS", frozenset(levels))

    return switch


@pytest.fixture
def counted(monkeypatch):
    """oneDNN's products, counted; without oneDNN there is nothing to test."""
    counted = Counted()
    if counted.really is None:
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(torch_private, "_ONEDNN_LINEAR", counted)
    return counted
