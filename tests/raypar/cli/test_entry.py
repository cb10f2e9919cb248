"""The console script: Ctrl-C while the commands are imported, and where it is ignored."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys

from raypar.cli.main import _messages

INTERRUPTED = """
import builtins, os, signal
before = builtins.__import__
def hit(name, *more):
    if name == "raypar.cli.main":
        builtins.__import__ = before
        os.kill(os.getpid(), signal.SIGINT)
    return before(name, *more)
builtins.__import__ = hit
from raypar.cli.entry import main
raise SystemExit(main())
"""

OBSERVED = """
import signal, raypar.cli.main
raypar.cli.main.run_command = lambda: print(signal.getsignal(signal.SIGINT).__name__, flush=True)
from raypar.cli.entry import main
"""


def ran(code, *words, **settings):
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **settings)


def test_ctrl_c_in_the_imports_leaves_no_traceback():
    done = ran(INTERRUPTED, "recipes")
    assert done.returncode == -signal.SIGINT
    assert (done.stdout, done.stderr) == ("", "")


def test_where_it_is_ignored_it_stays_so():
    done = ran(INTERRUPTED, "recipes", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert done.returncode == 0, done.stderr
    assert "gpt-tiny" in done.stdout


def test_the_command_has_its_own_answer_to_it():
    done = ran(f"{OBSERVED}\nmain()")
    assert done.stdout == "default_int_handler\n", done.stderr


def test_ctrl_c_after_the_command_leaves_no_traceback():
    at_exit = "atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), print('more')))"
    done = ran(f"import atexit, os\n{OBSERVED}\n{at_exit}\nmain()")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "default_int_handler\n", "")


def test_a_command_that_prints_no_warnings_answers_ctrl_c_as_well(capsys):
    with _messages(logging.ERROR):
        logging.getLogger("raypar.cluster.interrupts").warning("Ctrl-C: waiting")
        logging.getLogger("raypar.job").warning("not printed")
    assert capsys.readouterr().err == "Ctrl-C: waiting\n"
