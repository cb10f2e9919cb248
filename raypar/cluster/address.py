"""The address of a cluster: does one answer there, and does it accept this process?"""

from __future__ import annotations

import os
import socket

import grpc  # type: ignore[import-untyped]

from raypar.cluster.ray_private import own_token
from raypar.errors import ConfigError

_ANSWER_SECONDS = 4.0
_CLIENT = "ray://"
_NAME = "/ray.rpc.NodeInfoGcsService/GetClusterId"  # the call with which Ray itself introduces a driver


def demand_answer(address: str) -> None:
    """Check that a cluster answers. Ray itself would try again for 20 s, and not say why it failed.

    Args:
        address: RAY_ADDRESS. Of one without a port, such as "auto", nothing is known.

    Raises:
        OSError: Nothing answers there.
        ConfigError: The cluster demands a token, and refuses the one of this process; or the address is Ray Client's.
    """
    if address.startswith(_CLIENT):
        raise ConfigError([_through_a_proxy(address)])
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return
    token = _token()
    if token is None:
        return
    said = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(f"{host}:{port}", [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_NAME)(b"", timeout=_ANSWER_SECONDS, metadata=said)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise ConfigError([_refused(address, token)]) from None
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise OSError(f"what listens there is no Ray, or does not answer: {error.details()}") from error


def _token() -> str | None:
    """Return the token that Ray would send; "" without one, None if that is not known."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return ""
    return own_token()


def _through_a_proxy(address: str) -> str:
    host = address.removeprefix(_CLIENT).rpartition(":")[0] or "HOST"
    return (
        f"RAY_ADDRESS is {address!r}, which is Ray Client: its driver is not in the cluster and can't hear the actors; "
        f"on a machine of the cluster set RAY_ADDRESS={host}:6379, or from outside use ray job submit --address "
        f"http://{host}:8265 --working-dir . -- raypar train ..."
    )


def _refused(address: str, token: str) -> str:
    what = "refuses the token of this process" if token else "demands a token, and this process has none"
    return (
        f"RAY_ADDRESS is {address!r}, and the cluster there {what}: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to the "
        "cluster's token (or RAY_AUTH_TOKEN_PATH to a file that holds it); ray get-auth-token prints it on the head"
    )
