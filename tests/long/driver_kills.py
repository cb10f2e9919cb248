"""A driver that is killed again and again: its actors end, and the run goes on from its last checkpoint, bitwise.

    python -m tests.long.driver_kills [--kills 20] [--seed N]

Each session of ``raypar train`` gets SIGKILL a random time after its first new step; five seconds later none of its
actors may be alive. The next one goes on with ``--resume``. The losses and gradient norms of all steps are
compared with those of a run that nobody has killed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from tests.support.process_tree import command_line, descendants, lives

ENDED = 5.0  # seconds in which the actors of a driver that was killed have ended
PATIENCE = 90.0  # seconds for a step to come
RUN = ["gpt-tiny", "--mesh.pp", "2", "--model.dropout", "0.1", "--microbatches", "4", "--save-every", "1"]
TRAIN = [sys.executable, "-c", "import sys; from raypar.cli.main import run_command as main; sys.exit(main())", "train"]


def lines_of(folder: Path) -> list[dict[str, float]]:
    """Return the steps that a run folder has, of one that was taken again the last."""
    try:
        whole = (folder / "metrics.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    found = {line["step"]: line for line in map(json.loads, whole) if "val_loss" not in line}
    return [found[step] for step in sorted(found)]


def actors_of(driver: int) -> list[int]:
    """Return the actors below a driver, without Ray's agents, which look for its other servers for a minute."""
    return [pid for pid in descendants(driver) if "ray::RayparActor" in command_line(pid)]


def begun(folder: Path, words: list[str]) -> subprocess.Popen[bytes]:
    """Start a session."""
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    log = (folder.parent / "output.txt").open("ab")
    return subprocess.Popen([*TRAIN, *words], stdout=log, stderr=log, env=environment)


def killed(folder: Path, words: list[str], draw: Random) -> tuple[int, float]:
    """Start a session and kill it. Returns how many steps were taken, and how long its actors lived on, in seconds."""
    steps, session = len(lines_of(folder)), begun(folder, words)
    end = time.monotonic() + PATIENCE
    while len(lines_of(folder)) <= steps:
        if session.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"no step was taken: see {folder.parent / 'output.txt'}")
        time.sleep(0.02)
    time.sleep(draw.random() * 0.5)
    actors = actors_of(session.pid)
    session.send_signal(signal.SIGKILL)
    session.wait()
    since = time.monotonic()
    if not actors:
        raise RuntimeError("it had no actors")
    while any(map(lives, actors)) and time.monotonic() - since < PATIENCE:
        time.sleep(0.02)
    return len(lines_of(folder)), time.monotonic() - since


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    draw, bad, longest = Random(chosen.seed), 0, 0.0
    with tempfile.TemporaryDirectory() as top:
        folder, whole = Path(top) / "killed" / "run", Path(top) / "whole" / "run"
        for one in (folder, whole):
            one.parent.mkdir()
        steps = ["--steps", str(400 * chosen.kills)]
        for number in range(chosen.kills):
            words = ["--resume", str(folder)] if number else [*RUN, *steps, "--folder", str(folder)]
            taken, lived = killed(folder, words, draw)
            longest, bad = max(longest, lived), bad + (lived > ENDED)
            print(f"kill {number + 1}: after step {taken}, its actors lived {lived:.2f} s longer", flush=True)
        last = len(lines_of(folder)) + 2
        for one, words in ((folder, ["--resume", str(folder)]), (whole, [*RUN, *steps, "--folder", str(whole)])):
            session = begun(one, words)
            while len(lines_of(one)) < last and session.poll() is None:
                time.sleep(0.05)
            session.send_signal(signal.SIGTERM)
            session.wait(PATIENCE)
        pairs = list(zip(lines_of(folder), lines_of(whole), strict=False))
        same = [one["loss"] == other["loss"] and one["grad_norm"] == other["grad_norm"] for one, other in pairs]
        print(f"{sum(same)} of {len(same)} steps have the same bits; the actors ended within {longest:.2f} s")
        bad += not all(same) or len(same) < last
    return bad


if __name__ == "__main__":
    sys.exit(main())
