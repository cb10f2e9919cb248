"""Serving a page to this machine while a run goes on: one path, made anew at every request."""

from __future__ import annotations

import errno
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from raypar.errors import ConfigError
from raypar.reporting.html.markup import script

HOST = "127.0.0.1"
EVERY = 3  # seconds between two loads of a page


class Live:
    """A server of one page, on 127.0.0.1 only.

    Args:
        made: Makes the page.
        port: The port; 0 takes a free one.

    Raises:
        ConfigError: If the port can't be had.
    """

    def __init__(self, made: Callable[[], str], port: int) -> None:
        try:
            self._server = ThreadingHTTPServer((HOST, port), _handler(made))
        except OSError as error:
            why = "is taken" if error.errno == errno.EADDRINUSE else f"can't be had ({error.strerror})"
            raise ConfigError(
                [f"port {port} of {HOST} {why}: give another --port, or 0 for any that is free"]
            ) from error
        except OverflowError as error:
            raise ConfigError([f"port is {port}: give --port a number from 0 to 65535"]) from error
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self._server.server_port}/"

    def serve(self) -> None:
        """Serve the page until Ctrl-C or ``stop``."""
        try:
            self._server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            pass
        finally:
            self._server.server_close()

    def stop(self) -> None:
        """End ``serve``, which another thread is in."""
        self._server.shutdown()


def _handler(made: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    own = f"sha256-{b64encode(sha256(script().encode()).digest()).decode()}"  # no other script may run

    class Handler(BaseHTTPRequestHandler):
        """Answers a request for the page, and refuses every other one."""

        def do_GET(self) -> None:
            self._answer(whole=True)

        def do_HEAD(self) -> None:
            self._answer(whole=False)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing of requests."""

        def _answer(self, *, whole: bool) -> None:
            port = self.connection.getsockname()[1]
            # A page elsewhere may have its own name led to 127.0.0.1, to read this one: its requests bear that name.
            if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            if self.path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            raw = made().encode(errors="replace")
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(raw)))
            self.send_header("Cache-Control", "no-store")
            self.send_header(
                "Content-Security-Policy", f"default-src 'none'; style-src 'unsafe-inline'; script-src '{own}'"
            )
            self.end_headers()
            if whole:
                self.wfile.write(raw)

    return Handler
