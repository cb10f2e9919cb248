"""What Ray makes an actor of."""

from __future__ import annotations

import inspect

import pytest

from raypar.actors.host import HostedServer, HostedWorker
from raypar.actors.server import Server
from raypar.actors.worker import Worker


def methods_of(kind):
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if name != "__init__"}


@pytest.mark.parametrize(("hosted", "kind"), [(HostedWorker, Worker), (HostedServer, Server)])
def test_an_actor_has_what_is_called_from_outside_and_nothing_else(hosted, kind):
    """Ray wraps whatever the class has: a step would pay for each call of one method by another."""
    assert methods_of(hosted) == {name for name in methods_of(kind) if not name.startswith("_")} | {"start"}
    assert not issubclass(hosted, kind)
