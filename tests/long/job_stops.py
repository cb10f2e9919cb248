"""Stop runs at random moments, by ``ray job stop`` and by Ctrl-C: each leaves what it goes on from, with the same bits.

    python -m tests.long.job_stops [--stops N] [--seed N]

Runs with steps of seconds, which outlast the 3 s that ``ray job stop`` waits by itself, and of tens of milliseconds, by
command and by a driver in Python. Each must leave a checkpoint that lacks one step at the most, and the losses of the
run that goes on from it must be those of an undisturbed one. Exit code 1 otherwise.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import raypar as rp
from raypar.paths import CHECKPOINTS, checkpoints
from tests.support.clusters import RAY
from tests.support.process_tree import command_line, every_process

ROOT = Path(__file__).parents[2]
PORT, DASHBOARD = 26479, 28265
STEPS, TO_COME = 500, 2  # of the run, and of the one that goes on
LATE = 180.0  # seconds
RUNS = {
    "short": rp.recipe("gpt-tiny", mesh=rp.Mesh(pp=2), steps=STEPS),
    "long": rp.recipe(
        "gpt-tiny",
        mesh=rp.Mesh(pp=2),
        steps=STEPS,
        model=replace(rp.recipe("gpt-tiny").model, hidden=256, seq=256),
        microbatches=32,
        micro_batch_size=4,
    ),
}
DRIVER = """
import pickle, sys
import raypar as rp

with rp.launch(pickle.load(open(sys.argv[1], "rb"))) as job:
    job.train()
"""


@contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Start a Ray with a server of jobs for the time of the context."""
    start = [RAY, "start", "--head", "--num-cpus=4", f"--port={PORT}", f"--dashboard-port={DASHBOARD}"]
    start += [f"--temp-dir={folder}/ray", "--object-store-memory=100000000", "--include-dashboard=true"]
    try:
        subprocess.run(start, check=True, stdout=subprocess.DEVNULL, timeout=180)
        yield
    finally:
        for pid in every_process():
            if pid != os.getpid() and f"{folder}/ray" in command_line(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def losses_in(folder: Path) -> dict[int, float]:
    """Return the losses that a run has reported, by the number of steps taken."""
    path, found = folder / "metrics.jsonl", dict[int, float]()
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(ValueError):
            one = json.loads(line)
            if "loss" in one and "steps_taken" in one:
                found[int(one["steps_taken"])] = float(one["loss"])
    return found


def command(how: str, run: rp.Run, folder: Path) -> list[str]:
    """Return what trains, a command of raypar or a driver in Python."""
    import pickle

    if how == "driver":
        (folder.parent / f"{folder.name}.run").write_bytes(pickle.dumps(replace(run, folder=str(folder))))
        (folder.parent / "driver.py").write_text(DRIVER)
        return [sys.executable, str(folder.parent / "driver.py"), f"{folder}.run"]
    model = [f"--model.{name} {getattr(run.model, name)}" for name in ("hidden", "seq")]
    sizes = [*model, f"--microbatches {run.microbatches}", f"--micro-batch-size {run.micro_batch_size}"]
    words = " ".join(["-m raypar train gpt-tiny --mesh.pp 2", f"--steps {STEPS}", *sizes, f"--folder {folder}"])
    return [sys.executable, *words.split()]


def submitted(words: list[str], name: str) -> None:
    """Submit a job, with no more time to stop than Ray gives by itself."""
    env = json.dumps({"env_vars": {"PYTHONPATH": str(ROOT)}})
    job = [RAY, "job", "submit", f"--address=http://127.0.0.1:{DASHBOARD}", "--no-wait", f"--submission-id={name}"]
    subprocess.run([*job, f"--runtime-env-json={env}", "--", *words], check=True, capture_output=True, timeout=LATE)


def stopped(name: str) -> None:
    """Stop a job as a user does."""
    stop = [RAY, "job", "stop", f"--address=http://127.0.0.1:{DASHBOARD}", name]
    subprocess.run(stop, check=True, capture_output=True, timeout=LATE)


def logs_of(name: str) -> str:
    """Return what a job has written."""
    words = [RAY, "job", "logs", f"--address=http://127.0.0.1:{DASHBOARD}", name]
    return subprocess.run(words, capture_output=True, text=True, timeout=LATE, check=False).stdout


def wait_for_steps(folder: Path, count: int) -> float:
    """Wait until a run has reported so many steps; return how long the last one took."""
    end, before = time.monotonic() + LATE, time.monotonic()
    seen = 0
    while seen < count:
        assert time.monotonic() < end, f"{folder}: {seen} steps after {LATE:g} s"
        if len(losses_in(folder)) > seen:
            seen, took, before = len(losses_in(folder)), time.monotonic() - before, time.monotonic()
        time.sleep(0.02)
    return took


def check(what: str, told: str = "", *, holds: bool) -> bool:
    print(f"{'ok' if holds else 'FAILED'}: {what}{'' if holds else chr(10) + told}", flush=True)
    return holds


def is_kept(kind: str, how: str, by: str, number: int, folder: Path, random: Random, whole: dict[int, float]) -> bool:
    """Stop a run at a random moment, let it go on, and compare its losses with those of the undisturbed run."""
    run, name = RUNS[kind], f"{kind}-{how}-{number}"
    words = command(how, run, folder / name)
    env = os.environ | {"RAY_ADDRESS": f"127.0.0.1:{PORT}", "PYTHONPATH": str(ROOT)}
    if by == "ray job stop":
        submitted(words, name)
    else:
        output = (folder / f"{name}.log").open("w")
        process = subprocess.Popen(words, env=env, stdout=output, stderr=output, cwd=folder)
    took = wait_for_steps(folder / name, random.randint(1, 2) if kind == "long" else random.randint(2, 40))
    pause = random.uniform(0.0, took)
    time.sleep(pause)
    if by == "ray job stop":
        stopped(name)
        told = logs_of(name)
    else:
        process.send_signal(signal.SIGINT)
        process.wait(LATE)
        told = (folder / f"{name}.log").read_text()
    time.sleep(1.0)
    taken, kept = max(losses_in(folder / name)), [step for step, _ in checkpoints(folder / name / CHECKPOINTS)]
    lost = taken + 1 - max(kept, default=0)  # with the one under way
    how_many = f"{taken} steps of {took:.2f} s were reported, {max(kept, default=0)} are saved"
    what = f"{kind} steps, {how}, {by} {pause:.2f} s into one: {how_many}"
    if not check(what, told, holds=bool(kept) and lost <= 1):
        return False
    os.environ["RAY_ADDRESS"] = f"127.0.0.1:{PORT}"
    with rp.launch(replace(run, folder=None), resume=folder / name) as job:
        first = job.next_step
        got = {report.steps_taken: report.loss for report in job.train(TO_COME)}
    rp_whole = {step: whole[step] for step in got}
    return check(f"    the losses after step {first} have the same bits", f"{got} {rp_whole}", holds=got == rp_whole)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=12)
    parser.add_argument("--seed", type=int, default=56)
    args = parser.parse_args()
    random, oks = Random(args.seed), list[bool]()
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with tempfile.TemporaryDirectory(dir="/tmp") as name, cluster(Path(name)):
        folder = Path(name)
        os.environ["RAY_ADDRESS"] = f"127.0.0.1:{PORT}"
        whole = dict[str, dict[int, float]]()
        for kind, count in (("long", 8), ("short", 200)):
            with rp.launch(RUNS[kind]) as job:
                whole[kind] = {report.steps_taken: report.loss for report in job.train(count)}
        ways = [(kind, how) for kind in ("long", "short") for how in ("command", "driver")]
        for number in range(args.stops):
            kind, how = ways[number % len(ways)]
            by = "ray job stop" if number < args.stops * 5 // 6 else "Ctrl-C"
            oks.append(is_kept(kind, how, by, number, folder, random, whole[kind]))
    return not all(oks)


if __name__ == "__main__":
    sys.exit(main())
