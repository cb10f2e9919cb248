"""Actors that are killed in the middle of something else than a step: of what they do then, and of the launch itself.

    python -m tests.long.aimed_kills [--kills 6] [--seed 0] [--kinds save,launch]

Kills are aimed at generation, evaluation, a save, a relayout, and at launches; each comes at a random time within what
is disturbed. The run must go on with the bits of the undisturbed one, or the error must name the actor and what it
died of; nothing may take longer than a minute. At last 16 actors train on the cores that there are, with one killed.
Prints what came of each kind. Exit code 1 if something else did.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import raypar as rp
from raypar.job.job import Job
from tests.support.process_tree import command_line, descendants

MODEL = rp.GPT(layers=4, hidden=64, heads=4, seq=32, dropout=0.1)
RUN = rp.Run(model=MODEL, mesh=rp.Mesh(pp=2), microbatches=4, steps=400, max_failures=1000, timeout=30.0)
LONGEST = 60.0  # seconds


def pids(job: Job) -> list[int]:
    """The processes of a job's actors, by rank."""
    return [one.process.pid for one in job._loop.loaded.calls.all("located", what="the processes")]


def killed_after(seconds: float, pid: int) -> threading.Timer:
    """Kill a process after some time."""

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.start()
    return timer


def relaid(job: Job) -> None:
    """Go to the other layout, whose numbers are the same."""
    job.relayout(mesh=rp.Mesh(pp=1) if job.run.mesh.pp == 2 else rp.Mesh(pp=2))


KINDS: dict[str, Callable[[Job, Path], object]] = {
    "generation": lambda job, _: job.generate(["ab", "abcdef"], 24),
    "evaluation": lambda job, _: job.evaluate(8),
    "save": lambda job, folder: [job.save(folder, keep_last=2) for _ in range(3)],
    "relayout": lambda job, _: relaid(job),
}


def outcome(job: Job, call: Callable[[], object]) -> str:
    """What came of a call that was disturbed, in a word. Raises AssertionError if that must not be."""
    start = time.monotonic()
    try:
        call()
        came = "done"
    except (rp.JobError, rp.ConfigError, rp.CheckpointError) as error:
        told = str(error)
        assert "actor " in told or "lost" in told, told
        came = type(error).__name__
    took = time.monotonic() - start
    assert took < LONGEST, f"it took {took:.0f} s"
    return came


def disturbed(kind: str, kills: int, draw: random.Random) -> Counter[str]:
    """Kill an actor in something that the job does between two steps, as often as asked for."""
    found = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        with rp.launch(replace(RUN, max_failures=0)) as job:
            losses = [report.loss for report in job.train(2 * kills + 2)]
            start = time.monotonic()
            KINDS[kind](job, Path(folder) / "calm")
            lasts = time.monotonic() - start
        job, at = rp.launch(RUN), 1
        try:
            mine = [report.loss for report in job.train(1)]
            while at < 2 * kills + 1:
                timer = killed_after(draw.uniform(0, lasts), draw.choice(pids(job)))
                running = job
                came = outcome(job, lambda running=running: KINDS[kind](running, Path(folder) / "saved"))  # type: ignore[misc]
                timer.join()
                found[came] += 1
                try:
                    mine += [report.loss for report in job.train(1)]
                except rp.JobError as error:
                    assert "died" in str(error) or "over" in str(error), str(error)
                    found["the job ended"] += 1
                    job.close()
                    job, mine = rp.launch(RUN), []
                    mine = [report.loss for report in job.train(at + 1)]
                at += 1
                assert mine == losses[:at], f"step {at}: {mine[-1]} is not {losses[at - 1]}"
            found["failures survived"] = len(job.failures)
        finally:
            job.close()
    return found


def launches(kills: int, draw: random.Random) -> Counter[str]:
    """Kill an actor, as soon as there is one, while a job is launched."""
    found = Counter[str]()
    for _ in range(kills):
        delay, over = draw.uniform(0, 1.5), threading.Event()

        def aim(delay: float = delay, over: threading.Event = over) -> None:
            while not over.is_set():
                named = [pid for pid in descendants(os.getpid()) if "ray::RayparActor" in command_line(pid)]
                if named:
                    time.sleep(delay)
                    with suppress(ProcessLookupError):
                        os.kill(named[0], signal.SIGKILL)
                    return
                time.sleep(0.05)

        thread = threading.Thread(target=aim)
        thread.start()
        start = time.monotonic()
        try:
            with rp.launch(replace(RUN, max_failures=0)) as job:
                job.train(1)
            found["done"] += 1
        except rp.JobError as error:
            assert "actor pp=" in str(error), str(error)
            found[type(error).__name__] += 1
        assert time.monotonic() - start < LONGEST
        over.set()
        thread.join()
    return found


def crowd() -> str:
    """Train 16 actors, one of which is killed, on the cores that there are."""
    run = replace(RUN, mesh=rp.Mesh(pp=4, dp=4), steps=6, max_failures=3, timeout=120.0)
    with rp.launch(replace(run, max_failures=0)) as job:
        calm = [report.loss for report in job.train()]
    with rp.launch(run) as job:
        losses = [report.loss for report in job.train(2)]
        os.kill(pids(job)[7], signal.SIGKILL)
        losses += [report.loss for report in job.train(4)]
        assert len(job.failures) == 1
    assert losses == calm
    return "the bits of the undisturbed run"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help="some of them alone, with commas")
    given = parser.parse_args()
    logging.getLogger("raypar").setLevel(logging.CRITICAL)
    wrong = 0
    named: dict[str, Callable[[], object]] = {
        kind: partial(disturbed, kind, given.kills, random.Random(f"{given.seed} {kind}")) for kind in KINDS
    }
    named |= {"launch": partial(launches, given.kills, random.Random(given.seed)), "16 actors": crowd}
    for kind, call in named.items():
        if given.kinds and kind not in given.kinds.split(","):
            continue
        start = time.monotonic()
        try:
            told = call()
        except AssertionError as error:
            wrong += 1
            told = f"WRONG: {error}"
        print(f"{kind}: {told}, {time.monotonic() - start:.0f} s", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
