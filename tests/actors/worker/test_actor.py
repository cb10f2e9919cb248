"""What Ray makes an actor of."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from raypar.actors.worker.actor import RayparActor, Refusals
from raypar.actors.worker.parameter_server import Server
from raypar.actors.worker.worker import Worker
from raypar.schedules.action import STEP
from tests.support.team import Team, linears

HEAD = Path(__file__).parents[3] / "raypar"
ROOMS = ("actors", "schedules")


def functions(kind):
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if name != "__init__"}


def called():
    """The words that the driver's sources have as a text, or as the name of what is made remote."""
    files = [path for path in HEAD.rglob("*.py") if path.relative_to(HEAD).parts[0] not in ROOMS]
    return set(re.findall(r'"(\w+)"|\.(\w+)\.(?:remote|options)\(', "".join(path.read_text() for path in files)))


def test_an_actor_has_what_the_driver_calls_and_nothing_else():
    """Ray wraps whatever the class has: a step would compute for each call of one method by another."""
    assert functions(RayparActor) <= {one or other for one, other in called()}
    assert not issubclass(RayparActor, Worker | Server)


def test_whoever_takes_no_part_says_so():
    hosted = RayparActor.__new__(RayparActor)
    hosted._member, hosted._joined, hosted._keeper, hosted._handover = None, {}, None, None
    hosted._refusals = Refusals()
    with pytest.raises(RuntimeError, match="this actor takes no part in a run: start it with a plan"):
        hosted.train(b"[0, null, 0, 0]")
    assert hosted.progress().step == -1
    hosted.abort()


def test_a_server_has_no_values_to_peek_at():
    team = Team(linears(2), pp=1, dp=2, data_parallel="parameter_server")
    (server,) = team.servers
    server.open(0)
    with pytest.raises(KeyError):
        server.peek(STEP, False)
    assert (server.held().values, server.watch(), server.sights([None])) == ({}, (), [None])
