"""How soon a run notices that an actor was killed or stopped, at random moments of its steps.

    python -m tests.long.notice_time [--kills 100] [--stops 5] [--seed 0]

A second thread sends SIGKILL or SIGSTOP to a random actor of a pipeline, once the run has gone on after the last one.
The time is from the signal until the failure is known to the driver, before anything is replaced. A kill must be
known within 0.25 s (99th percentile), a stop within its deadline + 1 s. Exit code 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from random import Random

import raypar as rp

RUN = rp.Run(
    model=rp.GPT(layers=4, hidden=64, heads=4, seq=32), mesh=rp.Mesh(pp=2), microbatches=4, steps=100_000, timeout=30.0
)
DEADLINE = 10.0  # seconds of silence after which an actor is given up (docs/recovery.md)


class Signals(threading.Thread):
    """Sends signals to actors while another thread trains, and then stops the training.

    Args:
        job: The job.
        numbers: The signals, in order.
        draw: Says whom and when.

    Attributes:
        sent: When each was sent, in seconds since the epoch.
    """

    def __init__(self, job: rp.Job, numbers: list[signal.Signals], draw: Random) -> None:
        super().__init__(daemon=True)
        self._job, self._numbers, self._draw = job, numbers, draw
        self.sent: list[float] = []
        self._is_over = False

    def run(self) -> None:
        for number in self._numbers:
            time.sleep(self._draw.uniform(0.3, 0.6))
            pid = self._draw.choice([actor.pid for actor in self._job.who() if actor.pid])
            self.sent.append(time.time())
            os.kill(pid, number)
            end = time.monotonic() + 60
            while len(self._job.failures) < len(self.sent) and time.monotonic() < end:
                time.sleep(0.02)
        self._is_over = True

    def end_training(self, _: object) -> None:
        """Raise StopIteration once all signals are sent, and what they did is survived."""
        if self._is_over:
            raise StopIteration


class Known(logging.Handler):
    """Keeps when each failure was known, from the line that says that the run goes on after it."""

    def __init__(self, job: rp.Job) -> None:
        super().__init__()
        self._job = job
        self.at: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("the run goes on"):
            self.at.append(record.created - self._job.failures[-1].seconds)


def main() -> int:
    """Measure, and print."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--kills", type=int, default=100)
    words.add_argument("--stops", type=int, default=5)
    words.add_argument("--seed", type=int, default=0)
    args = words.parse_args()
    numbers = [signal.SIGKILL] * args.kills + [signal.SIGSTOP] * args.stops
    logging.getLogger("raypar").setLevel(logging.WARNING)
    run = replace(RUN, max_failures=2 * len(numbers))
    with rp.launch(run) as job:
        known, signals = Known(job), Signals(job, numbers, Random(args.seed))
        logging.getLogger("raypar").addHandler(known)
        signals.start()
        with suppress(StopIteration):
            job.train(on=signals.end_training)
    took = [at - sent for at, sent in zip(known.at, signals.sent, strict=True)]
    kills, stops = sorted(took[: args.kills]), sorted(took[args.kills :])
    bad = False
    for what, seconds, most in (("kill", kills, 0.25), ("stop", stops, DEADLINE + 1)):
        if seconds:
            high = seconds[-(-99 * len(seconds) // 100) - 1]
            middle = seconds[len(seconds) // 2]
            print(f"{len(seconds)} x {what}: known after {middle:.3f} s at the median, 99 % within {high:.3f} s")
            bad |= high > most
    return bad


if __name__ == "__main__":
    sys.exit(main())
