"""Launches and ends jobs again and again in one process, and says what is left: as much after the last as before.

    python -m tests.long.leaks [--times 50] [--warm 4]

Every job starts a Ray of its own, trains, writes a run folder that is removed, and ends in turn by itself, by an error
of a layer, after an actor was killed and replaced, and with one that ends it. Counted are this process's descriptors,
memory files, threads and children, the files of /dev/shm and of the folder for temporary files, and the processes that
name one of the Rays. What Ray and an actor leave without raypar is measured first, and does not count.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import ray
import torch
from torch import nn

import raypar as rp
from tests.support.process_tree import descendants, naming

SETTLED = 20.0  # seconds in which the last processes of a Ray end


class Failing(nn.Linear):
    """A layer that fails at will."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's outputs."""
        if x.shape[0] == 7:
            raise ValueError("seven rows")
        return super().forward(x)


class Idle:
    """An actor that does nothing."""

    def answer(self) -> int:
        """Return a number."""
        return 1


def trained(number: int, folder: str) -> str:
    """Launch a job, train, and end it in one of four ways. Returns the folder of its Ray's session."""
    seven = number % 4 == 1

    def batch(step: int, microbatch: int, dp: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ones(7 if seven and step == 2 else 3, 8)
        return x, x

    survives = number % 4 == 2
    kill = [rp.chaos.kill("pp=1 dp=0", at="STEP", step=2)] if number % 4 > 1 else []
    run = rp.Run(
        model=rp.Layers(lambda: [Failing(8, 8) for _ in range(2)], nn.functional.mse_loss),
        data=rp.Batches(batch),
        mesh=rp.Mesh(pp=2, dp=2),
        microbatches=2,
        steps=4,
        save_every=2,
        folder=folder,
        max_failures=int(survives),
        zero=1,
    )
    session = ""
    with suppress(rp.JobError), rp.launch(run, chaos=kill) as job:
        session = str(ray._private.worker._global_node.get_session_dir_path())
        job.train()
    return session


def left() -> dict[str, int]:
    """Return what there is of this process, of shared memory and of temporary files."""
    opened = [str(fd.resolve()) for fd in entries("/proc/self/fd")]
    return {
        "descriptors": len(opened),
        "memory files": sum("memfd:" in one for one in opened),
        "threads": threading.active_count(),
        "tasks": len(entries("/proc/self/task")),
        "children": len(descendants(os.getpid())),
        "shared memory": len(entries("/dev/shm")),
        "temporary files": len([path for path in entries(tempfile.gettempdir()) if path.name != "ray"]),
        "MiB": int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20,
    }


def entries(folder: str) -> list[Path]:
    """Return what is in a folder."""
    return list(Path(folder).iterdir())


def rays_own() -> dict[str, int]:
    """Return what a start and an end of Ray with an actor leaves each time, without raypar."""
    counts = []
    for _ in range(4):
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        actor = ray.remote(Idle).remote()
        ray.get(actor.answer.remote())
        ray.kill(actor)
        ray.shutdown()
        counts.append(left())
    return {name: math.ceil((counts[-1][name] - counts[0][name]) / (len(counts) - 1)) for name in counts[0]}


def awaited(is_so: Callable[[], bool]) -> None:
    """Wait until something is so, for a limited time."""
    end = time.monotonic() + SETTLED
    while not is_so() and time.monotonic() < end:
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--warm", type=int, default=4)
    chosen = parser.parse_args()
    logging.getLogger("raypar").handlers = [logging.NullHandler()]
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with tempfile.TemporaryDirectory() as folder:  # nobody else writes to it
        os.environ["TMPDIR"], tempfile.tempdir = folder, folder
        return counted(chosen.times, chosen.warm)


def counted(times: int, warm: int) -> int:
    """Launch so many jobs, and count what is left after those that warm up and after all. Returns an exit code."""
    own = rays_own()
    print(
        f"each start of Ray and an actor alone leaves { ({name: own[name] for name in ('descriptors', 'tasks')}) }",
        flush=True,
    )
    sessions, before, start = list[str](), dict[str, int](), time.monotonic()
    for number in range(warm + times):
        if number == warm:
            awaited(lambda: not descendants(os.getpid()))
            before = left()
            print(f"after {number} launches: {before}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            sessions.append(Path(trained(number, f"{folder}/run")).name or "no session")
    awaited(lambda: not descendants(os.getpid()) and not naming(sessions))
    after = left()
    print(f"after {times} more, {time.monotonic() - start:.0f} s: {after}")
    grown = {name: after[name] - count - times * own[name] for name, count in before.items()}
    more = {name: count for name, count in grown.items() if count > 0 and name not in ("MiB", "tasks")}
    more |= {"processes of Ray": len(there)} if (there := naming(sessions)) else {}
    print(f"more than before, without what Ray alone leaves: {more or 'nothing'}")
    return int(bool(more))


if __name__ == "__main__":
    sys.exit(main())
