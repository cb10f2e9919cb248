"""Who may run code on the cluster: whether its dashboard and its head take calls without a token, and from where."""

from __future__ import annotations

import http.client
import ipaddress
from collections.abc import Iterator
from contextlib import closing, suppress

from raypar.cluster.address import accepts
from raypar.doctor.finding import Finding

_SECONDS = 4.0
_REFUSED = (401, 403)


def exposure_findings(head: str, dashboard: str) -> Iterator[Finding]:
    """Yield how the cluster can be reached without its token.

    Args:
        head: Address of the head, with its port; "" if not known.
        dashboard: Address of the dashboard, with its port; "" if there is none.
    """
    yield from head_findings(head)
    if not dashboard:
        yield Finding("ok", "dashboard", "there is none")
        return
    host = dashboard.removeprefix("http://").removeprefix("https://").rstrip("/")
    answer = answer_without_token(host)
    if is_loopback(host):
        yield Finding("ok", "dashboard", f"{host} is reached from the head alone; ray job submit goes through ssh -L")
    elif answer in _REFUSED:
        advice = "what it sends is not encrypted: keep the port inside a private network"
        yield Finding("note", "dashboard", f"{host} is open to the network, and demands the token", advice)
    elif answer is None:
        yield Finding("note", "dashboard", f"{host} does not answer from here")
    else:
        advice = "start the head with --dashboard-host=127.0.0.1, and with RAY_AUTH_MODE=token on all nodes"
        yield Finding("danger", "dashboard", f"{host} takes jobs from anyone who reaches it, without a token", advice)


def head_findings(head: str) -> Iterator[Finding]:
    """Yield whether the head takes a driver without a token."""
    host, _, port = head.rpartition(":")
    if not host or not port.isdigit():
        return
    open_to_all = accepts(head, "")
    if is_loopback(head):
        yield Finding("ok", "token", f"the head {head} is reached from its machine alone")
    elif open_to_all:
        advice = (
            "ray get-auth-token --generate, copy ~/.ray/auth_token to all nodes, start Ray with RAY_AUTH_MODE=token"
        )
        yield Finding(
            "danger", "token", f"anyone who reaches the head {head} can run code there, without a token", advice
        )
    elif open_to_all is None:
        yield Finding("note", "token", f"the head {head} does not say whether it demands a token")
    else:
        yield Finding("ok", "token", f"the head {head} demands the token")


def is_loopback(address: str) -> bool:
    """Return whether an address, with a port, is one that only its own machine reaches."""
    host = address.rpartition(":")[0].strip("[]") or address
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def answer_without_token(host: str) -> int | None:
    """Return the HTTP status with which a dashboard answers a question without a token; None if it does not."""
    connection = http.client.HTTPConnection(host, timeout=_SECONDS)
    with closing(connection), suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/api/jobs/")
        return connection.getresponse().status
    return None
