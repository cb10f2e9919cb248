"""A cluster that refuses a token is told from one that does not answer, and soon."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
import ray

from raypar.cluster import address
from raypar.cluster.lifecycle import ray_cluster
from raypar.errors import ConfigError

TOKEN = "0123456789abcdef" * 4


class Head(grpc.GenericRpcHandler):
    """What a Ray head answers, with a token or without one: that there is nothing."""

    def __init__(self, token):
        self.token = token

    def service(self, details):
        given = dict(details.invocation_metadata).get("authorization")

        def answer(request, context):
            if self.token and given != f"Bearer {self.token}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken: missing or incorrect")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def served(token):
    server = grpc.server(ThreadPoolExecutor(1), handlers=[Head(token)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture(scope="module")
def head():
    with served(TOKEN) as its:
        yield its


@pytest.mark.parametrize(
    ("mode", "token", "says"),
    [
        ("token", "ffff", "refuses the token of this process"),
        ("token", "", "demands a token, and this process has none"),
    ],
)
def test_a_cluster_that_refuses_a_token_is_told_with_what_mends_it(head, monkeypatch, mode, token, says):
    monkeypatch.setenv("RAY_ADDRESS", head)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(address, "own_token", lambda: token)
    start = time.monotonic()
    with pytest.raises(ConfigError, match=says) as caught:
        ray_cluster._connect()
    assert time.monotonic() - start < 5
    (fault,) = caught.value.faults
    assert "RAY_AUTH_MODE=token" in fault and "RAY_AUTH_TOKEN" in fault and "RAY_AUTH_TOKEN_PATH" in fault


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({}, "as RAY_AUTH_MODE is not set: RAY_AUTH_MODE=token lets it send that of ~/.ray/auth_token"),
        (
            {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN_PATH": "t"},
            "'disabled': RAY_AUTH_MODE=token lets it send that of t",
        ),
        ({"RAY_AUTH_TOKEN": "t"}, "RAY_AUTH_MODE=token lets it send that of RAY_AUTH_TOKEN"),
    ],
)
def test_a_token_that_is_there_and_not_sent_needs_its_mode_alone(head, monkeypatch, env, says):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(address, "own_token", lambda: TOKEN)
    with pytest.raises(ConfigError) as caught:
        address.demand_answer(head)
    (fault,) = caught.value.faults
    assert fault.endswith(says) and "demands a token, but this process sends none" in fault


def test_a_token_that_fits_is_accepted(head, monkeypatch):
    monkeypatch.setattr(address, "_token", lambda: TOKEN)
    monkeypatch.setattr(address, "has_own_node", lambda *_: True)
    address.demand_answer(head)


@pytest.mark.parametrize("content", [None, ""])
def test_a_token_file_that_is_missing_or_empty_is_named(head, monkeypatch, tmp_path, content):
    if content is not None:
        (tmp_path / "token").write_text(content)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()
    with pytest.raises(ConfigError, match=f"RAY_AUTH_TOKEN_PATH is '{tmp_path}/token', which can't be"):
        address.demand_answer(head)


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_token_file_that_others_may_read_is_warned_of(head, monkeypatch, tmp_path, caplog, mode, warns):
    (tmp_path / "token").touch(mode)
    (tmp_path / "token").chmod(mode)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(address, "_token", lambda: TOKEN)
    monkeypatch.setattr(address, "has_own_node", lambda *_: None)
    address.demand_answer(head)
    assert (f"may read the cluster's token: chmod 600 {tmp_path}/token" in caplog.text) == warns


def test_an_address_of_ray_client_is_refused_with_the_two_ways_that_work(monkeypatch):
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "ray://head.example:10001")
    with pytest.raises(ConfigError, match="which is Ray Client") as caught:
        ray_cluster._connect()
    (fault,) = caught.value.faults
    assert "RAY_ADDRESS=head.example:6379" in fault and "8265:127.0.0.1:8265 head.example, and give it a job" in fault


def test_a_driver_that_ray_init_has_connected_by_ray_client_is_refused_in_the_same_words(monkeypatch):
    monkeypatch.setattr(address.client, "is_connected", lambda: True)
    with pytest.raises(ConfigError, match="which is Ray Client: its driver is not in the cluster") as caught:
        ray_cluster._connect()
    assert "this process is connected by ray.init('ray://...')" in str(caught.value)


def test_a_driver_outside_of_a_cluster_that_answers_is_told_soon_where_to_run(monkeypatch):
    """This machine may run nodes of other clusters."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setattr(address, "_NODE_SECONDS", 0.2)
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_cluster.ray, "init", lambda **_: pytest.fail("Ray would look for a minute"))
    why = "answers, but this machine is no node of it: run raypar on a node"
    with served("") as its, pytest.raises(ConfigError, match=why) as caught:
        monkeypatch.setenv("RAY_ADDRESS", its)
        ray_cluster._connect()
    assert "ray job submit --address http://127.0.0.1:8265 --working-dir ." in str(caught.value)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ("10.77.0.1", None, "which has no port: give that of ray start, as 10.77.0.1:6379"),
        ("head:abc", None, "which has no port: give that of ray start, as head:6379"),
        ("headX:6379", socket.gaierror(-3, "unknown name"), "(unknown name): correct the name, or give the IP"),
        ("head:6380", ConnectionRefusedError(111, "refused"), "start Ray there, or correct the port: it is 6379"),
        ("10.77.0.9:6379", OSError(113, "No route to host"), "correct the address, or see that the head is on"),
        ("auto", ConnectionError("no Ray here"), "(no Ray here): start Ray on this machine, or unset RAY_ADDRESS"),
    ],
)
def test_an_address_at_which_nothing_answers_is_told_with_what_mends_it(monkeypatch, given, error, says):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_cluster.ray, "init", fail)
    monkeypatch.setattr(address.socket, "create_connection", fail)
    monkeypatch.setenv("RAY_ADDRESS", given)
    with pytest.raises(ConfigError) as caught:
        ray_cluster._connect()
    (fault,) = caught.value.faults
    assert fault.startswith(f"RAY_ADDRESS is '{given}', ") and says in fault, fault


def test_a_port_where_nothing_answers_is_told_as_that(monkeypatch):
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(address, "_ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{deaf.getsockname()[1]}")
        with pytest.raises(ConfigError, match="no cluster answers there") as caught:
            ray_cluster._connect()
    assert "TOKEN" not in str(caught.value)
