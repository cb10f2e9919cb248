"""Exceptions as text."""

from __future__ import annotations

import torch
from torch import nn

from raypar.actors.errors import user_traceback


class Broken(nn.Module):
    def forward(self, x):
        return x.view(3, 5)


def traced(call, *args):
    try:
        call(*args)
    except Exception:
        return user_traceback()
    raise AssertionError("nothing was raised")


def test_a_trace_begins_with_the_users_code():
    lines = traced(nn.Sequential(Broken()).__call__, torch.zeros(2)).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "in traced" in lines[1]  # the test itself is not torch's


def test_what_is_between_is_left_out_in_front_only(monkeypatch):
    monkeypatch.setattr("raypar.actors.errors._ours", lambda: (__file__,))
    text = traced(nn.Sequential(Broken()).__call__, torch.zeros(2))
    assert "in traced" not in text
    assert "in _wrapped_call_impl" in text
    assert "in forward" in text


def test_an_error_of_our_own_shows_all(monkeypatch):
    monkeypatch.setattr("raypar.actors.errors._ours", lambda: ("/",))
    text = traced(nn.Linear(2, 2).__call__, torch.zeros(3))
    assert "in traced" in text
    assert "in forward" in text
