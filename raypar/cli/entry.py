"""The console script ``raypar``."""

from __future__ import annotations

import signal


def main() -> int:
    """Run the command line of this process.

    Ctrl-C ends it without a traceback while the commands are still imported, and once the command is over.

    Returns:
        The exit code, see --help.
    """
    handler = signal.getsignal(signal.SIGINT)
    at_ends = (
        signal.SIG_DFL if handler is signal.default_int_handler else handler
    )  # it may be ignored, as in the background
    signal.signal(signal.SIGINT, at_ends)
    from raypar.cli.main import run_command as run

    signal.signal(signal.SIGINT, handler)
    try:
        return run()
    finally:
        signal.signal(signal.SIGINT, at_ends)
