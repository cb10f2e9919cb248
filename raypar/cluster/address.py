"""The address of a cluster: does a cluster answer there, and does it accept this process?"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
from ray.exceptions import AuthenticationError
from ray.util.client import ray as client

from raypar.actors.errors import first_line
from raypar.cluster.ray_private import has_own_node, own_token
from raypar.errors import ConfigError

log = logging.getLogger(__name__)

_OTHERS_MAY = 0o077
_ANSWER_SECONDS = 4.0
_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_NODE_SECONDS = 3.0  # within which a node of this machine has registered with the head
_CLIENT = "ray://"
_PORT = 6379  # of ray start
_WITHOUT_PORT = ("auto", "local")
_NAME = "/ray.rpc.NodeInfoGcsService/GetClusterId"  # the call with which Ray itself introduces a driver


def demand_answer(address: str) -> None:
    """Check that a cluster answers and accepts this process. Ray itself would retry for a minute without a reason.

    Args:
        address: RAY_ADDRESS. "auto" and "local" are not checked.

    Raises:
        OSError: Nothing answers there.
        ConfigError: The cluster demands a token, and refuses this process's token, or the token's file can't be read;
            this machine is no node of the cluster; or the address is Ray Client's, or has no port.
    """
    if address in _WITHOUT_PORT:
        return
    if address.startswith(_CLIENT):
        host = address.removeprefix(_CLIENT).rpartition(":")[0] or "HOST"
        raise ConfigError([_through_a_proxy(f"RAY_ADDRESS is {address!r}", host)])
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        right = f"{host or address}:{_PORT}"
        raise ConfigError([f"RAY_ADDRESS is {address!r}, which has no port: give that of ray start, as {right}"])
    socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return
    token = _token()
    if token is None:
        return
    if token:
        _warn_of_readers()
    error = _answer(address, token)
    if error is None:
        if has_own_node(address, _NODE_SECONDS) is False:
            raise ConfigError([_from_outside(address)])
    elif error.code() is grpc.StatusCode.UNAUTHENTICATED:
        raise ConfigError([_refused(address, token)]) from None
    elif error.code() in _SILENT:
        raise OSError(f"what listens there is no Ray, or does not answer: {error.details()}") from error


def accepts(address: str, token: str) -> bool | None:
    """Return whether the head at an address with a port accepts a driver with a token; None if not known.

    Args:
        address: The address.
        token: The token; "" for none.
    """
    error = _answer(address, token)
    if error is None:
        return True
    return False if error.code() is grpc.StatusCode.UNAUTHENTICATED else None


def _answer(address: str, token: str) -> Any:
    """Call the head as Ray does to introduce a driver; return the error of the call, None if there is none."""
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_NAME)(b"", timeout=_ANSWER_SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            return error
    return None


def _token() -> str | None:
    """Return the token that Ray would send; "" without one, None if not known.

    Raises:
        ConfigError: RAY_AUTH_TOKEN_PATH names a file that can't be read, or that is empty.
    """
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":  # unset, a driver of a cluster sends none
        return ""
    try:
        return own_token()
    except AuthenticationError as error:
        path = os.environ.get("RAY_AUTH_TOKEN_PATH", "")
        raise ConfigError(
            [
                f"RAY_AUTH_TOKEN_PATH is {path!r}, which can't be read or holds no token: name a file with the "
                "cluster's token, or unset it to use ~/.ray/auth_token; ray get-auth-token prints the token on the head"
            ]
        ) from error


def unanswered(address: str, error: Exception) -> str:
    """Return the error message for an address where no cluster answers, with the reason and the fix."""
    if address in _WITHOUT_PORT:
        mend = "start Ray on this machine, or unset RAY_ADDRESS: a launch starts a Ray of its own then"
    elif isinstance(error, socket.gaierror):
        mend = "correct the name, or give the IP address of the head"
    elif isinstance(error, ConnectionRefusedError):
        mend = f"start Ray there, or correct the port: it is {_PORT}, unless its ray start had another --port"
    else:
        mend = "correct the address, or see that the head is on, its Ray runs, and no firewall closes the port"
    reason = getattr(error, "strerror", None) or first_line(error)
    return f"RAY_ADDRESS is {address!r}, but no cluster answers there ({reason}): {mend}"


def _from_outside(address: str) -> str:
    """Return the error message for a cluster that answers at an address, but accepts no driver from this machine."""
    host = address.rpartition(":")[0]
    return (
        f"RAY_ADDRESS is {address!r}, and the cluster there answers, but this machine is no node of it: run raypar on "
        f"a node of the cluster, with RAY_ADDRESS={address}, or from here {_as_a_job(host)}"
    )


def _as_a_job(host: str) -> str:
    """Explain how to submit a job from outside a cluster whose dashboard listens on its own machine only."""
    return (
        f"open a tunnel, ssh -N -L 8265:127.0.0.1:8265 {host}, and give it a job: RAY_AUTH_MODE=token ray job submit "
        "--address http://127.0.0.1:8265 --working-dir . --runtime-env-json "
        """'{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}}' -- raypar train ..."""
    )


def _through_a_proxy(what: str, host: str) -> str:
    return (
        f"{what}, which is Ray Client: its driver is not in the cluster and can't hear the actors; "
        f"on a machine of the cluster set RAY_ADDRESS={host}:{_PORT}, or from outside {_as_a_job(host)}"
    )


def demand_driver() -> None:
    """Raise ConfigError if this process is connected by Ray Client, as by ray.init("ray://...")."""
    if client.is_connected():
        raise ConfigError([_through_a_proxy("this process is connected by ray.init('ray://...')", "HOST")])


def _warn_of_readers() -> None:
    """Warn if other users of this machine may read the token's file."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    with suppress(OSError):
        if path.stat().st_mode & _OTHERS_MAY:
            log.warning("others on this machine may read the cluster's token: chmod 600 %s", path)


def _unsent() -> str:
    """Return the source of the token that RAY_AUTH_MODE=token would send; "" if there is none."""
    with suppress(AuthenticationError):
        if own_token():
            if os.environ.get("RAY_AUTH_TOKEN"):
                return "RAY_AUTH_TOKEN"
            return os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    return ""


def _refused(address: str, token: str) -> str:
    mode = os.environ.get("RAY_AUTH_MODE")
    if not token and (unsent := _unsent()):
        is_so = f"RAY_AUTH_MODE is {mode!r}" if mode else "RAY_AUTH_MODE is not set"
        return (
            f"RAY_ADDRESS is {address!r}, and the cluster there demands a token, but this process sends none, as "
            f"{is_so}: RAY_AUTH_MODE=token lets it send that of {unsent}"
        )
    what = "refuses the token of this process" if token else "demands a token, and this process has none"
    return (
        f"RAY_ADDRESS is {address!r}, and the cluster there {what}: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to the "
        "cluster's token (or RAY_AUTH_TOKEN_PATH to a file that holds it); ray get-auth-token prints it on the head"
    )
