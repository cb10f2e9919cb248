"""A cluster that refuses a token is told from one that does not answer, and soon."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import ray

from raypar.cluster import address, ray_cluster
from raypar.errors import ConfigError

TOKEN = "0123456789abcdef" * 4


class Head(grpc.GenericRpcHandler):
    """What a Ray head with a token answers."""

    def service(self, details):
        given = dict(details.invocation_metadata).get("authorization")

        def answer(request, context):
            if given != f"Bearer {TOKEN}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken: missing or incorrect")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture(scope="module")
def head():
    server = grpc.server(ThreadPoolExecutor(1), handlers=[Head()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.mark.parametrize(
    ("mode", "token", "says"),
    [
        ("token", "ffff", "refuses the token of this process"),
        ("token", "", "demands a token, and this process has none"),
        ("disabled", TOKEN, "demands a token, and this process has none"),
        ("", TOKEN, "demands a token, and this process has none"),
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


def test_a_token_that_fits_is_accepted(head, monkeypatch):
    monkeypatch.setattr(address, "_token", lambda: TOKEN)
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
    address.demand_answer(head)
    assert (f"may read the cluster's token: chmod 600 {tmp_path}/token" in caplog.text) == warns


def test_an_address_of_ray_client_is_refused_with_the_two_ways_that_work(monkeypatch):
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "ray://head.example:10001")
    with pytest.raises(ConfigError, match="which is Ray Client") as caught:
        ray_cluster._connect()
    (fault,) = caught.value.faults
    assert "RAY_ADDRESS=head.example:6379" in fault and "8265:127.0.0.1:8265 head.example, and give it a job" in fault


def test_a_driver_outside_of_a_cluster_that_answers_is_told_where_to_run(head, monkeypatch):
    def outside(**settings):
        raise ConnectionError(f"Failed to connect to Ray cluster at {head}")

    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setattr(address, "_answer", lambda *_: None)
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_cluster.ray, "init", outside)
    monkeypatch.setenv("RAY_ADDRESS", head)
    with pytest.raises(ConfigError, match="answers, but this machine is no node of it: run raypar on a node") as caught:
        ray_cluster._connect()
    assert "ray job submit --address http://127.0.0.1:8265 --working-dir ." in str(caught.value)


def test_a_port_where_nothing_answers_is_told_as_that(monkeypatch):
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(address, "_ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{deaf.getsockname()[1]}")
        with pytest.raises(ConfigError, match="no cluster answers there") as caught:
            ray_cluster._connect()
    assert "TOKEN" not in str(caught.value)
