"""What Ray makes an actor of."""

from __future__ import annotations

import inspect

import pytest

from raypar.actors.worker.actor import Hosted
from raypar.actors.worker.base import Member
from raypar.actors.worker.server import Server
from raypar.actors.worker.worker import Worker


def public(kind):
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def test_an_actor_has_what_is_called_from_outside_and_nothing_else():
    """Ray wraps whatever the class has: a step would pay for each call of one method by another."""
    assert public(Hosted) == public(Worker) | public(Server) | {"start", "leave"}
    assert not issubclass(Hosted, Member)


def test_what_one_kind_lacks_is_told():
    hosted = Hosted.__new__(Hosted)
    hosted._member = Server()
    with pytest.raises(AttributeError, match="'Server' object has no attribute 'peek'"):
        hosted.peek(0)
