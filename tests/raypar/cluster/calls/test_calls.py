"""Who is at fault where calls fail, over answers that are made up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

import raypar as rp
from raypar.actors.errors import ActionError
from raypar.actors.mesh.world import World
from raypar.cluster.calls import calls
from tests.support.refs import answered


class Actor:
    """An actor that answers one thing when it is asked for its progress, and has printed nothing."""

    def __init__(self, value):
        self.value = value
        self.progress = self
        self.printed = self if value is None else Actor(None)

    def options(self, **_):
        return self

    def remote(self):
        return answered(() if self.value is None else self.value)


def got(refs, timeout=None):
    return [ref.result(0) for ref in refs] if isinstance(refs, list) else refs.result(0)


def test_a_call_whose_actor_died_has_the_same_words_as_other_deaths():
    outcome = calls._outcome(calls.Answer("ref", 0, None, ActorDiedError()))
    assert isinstance(outcome, rp.JobError) and str(outcome) == "it died"


def failing(monkeypatch, secondary, second):
    """What is told when actor 0 fails in a message, and actor 1, whose calls are done, answers so."""
    monkeypatch.setattr(calls, "ray", SimpleNamespace(get=got))
    error = RayTaskError("act", "", ActionError("pp=0", "0SEND_F0", "pp=1", "the connection was closed", secondary, ""))
    actors = [Actor(SimpleNamespace(step=0, done=0, idle=True, action=None)), Actor(second)]
    with pytest.raises(rp.JobError) as raised:
        calls.Calls(actors, World(rp.Mesh(pp=2)), 1.0).gather([answered(error), answered("done")], "step 3")
    return raised.value


def test_an_actor_that_died_between_two_tasks_is_told_to_have_died(monkeypatch):
    error = failing(monkeypatch, secondary=True, second=ActorDiedError())
    assert isinstance(error, rp.ActorDiedError) and error.rank == 1
    assert str(error).startswith("actor pp=1 died during step 3; seen from the others: actor pp=0: action 0SEND_F0")


def test_who_lives_or_is_not_missed_is_not_blamed(monkeypatch):
    alive = SimpleNamespace(step=0, done=0, idle=True, action=None)
    for secondary, second in (True, alive), (False, ActorDiedError()):
        error = failing(monkeypatch, secondary, second)
        assert not isinstance(error, rp.ActorDiedError)
        assert str(error).startswith("actor pp=0: action 0SEND_F0 with pp=1 failed")
