"""A cluster that refuses a token is told from one that does not answer, and soon."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

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
    ],
)
def test_a_cluster_that_refuses_a_token_is_told_with_what_mends_it(head, monkeypatch, mode, token, says):
    monkeypatch.setenv("RAY_ADDRESS", head)
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


def test_a_port_where_nothing_answers_is_told_as_that(monkeypatch):
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(address, "_ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{deaf.getsockname()[1]}")
        with pytest.raises(ConfigError, match="no cluster answers there") as caught:
            ray_cluster._connect()
    assert "TOKEN" not in str(caught.value)
