"""The console script ``raypar``."""

from __future__ import annotations

import signal


def main() -> int:
    """Run the command line of this process. Ctrl-C ends it without a traceback while the commands are still imported.

    Returns:
        The exit code, see --help.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # not where it is ignored, as in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from raypar.cli.main import run_command as run

    signal.signal(signal.SIGINT, handler)
    return run()
