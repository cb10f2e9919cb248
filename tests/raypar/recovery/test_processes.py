"""Processes that are ended by their descriptors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from raypar.recovery.processes import Processes


def test_a_stopped_process_is_ended_and_a_dead_one_harms_nobody():
    stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    dead = subprocess.Popen(["true"])
    dead.wait()
    before = len(list(Path("/proc/self/fd").iterdir()))
    processes = Processes()
    processes.know({0: stopped.pid, 1: dead.pid})
    os.kill(stopped.pid, signal.SIGSTOP)
    for rank in (0, 1, 2, 0):
        processes.kill(rank)
    assert stopped.wait(10) == -signal.SIGKILL
    processes.know({0: os.getpid()})
    processes.close()
    processes.kill(0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
