"""Kill or stop a member of a group at a random moment of its collectives, again and again.

    python -m tests.long.group_kills [--kills 50] [--stops 20] [--size 3] [--seed 0]

After every blow each survivor has to raise GroupError within the deadline of the group + 1 s. At the end no process,
and not a byte in /dev/shm, may be left. Exit code 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from raypar.actors.collective.errors import GroupError
from raypar.actors.collective.gloo.group import GlooGroup, create_device
from raypar.actors.collective.group import Group, GroupMember
from tests.support.introduced import shm_group

DEADLINE = 1.0  # seconds that a wait may take


def join(transport: str, rank: int, size: int, folder: str) -> Group:
    store = dist.FileStore(f"{folder}/store", size)
    if transport == "shm":
        return shm_group("g", "dp", rank, size, DEADLINE, store=store)
    return GlooGroup(GroupMember("g", "dp", rank, size, DEADLINE), store, create_device("127.0.0.1"))


def work(group: Group, seed: int) -> None:
    """Ops of all kinds and sizes, the same on every member, until one fails."""
    chance = random.Random(seed)
    rank, size = group.rank, group.size
    while True:
        count = chance.choice([1, 300, 40_000, 700_000])
        tensor, rows = torch.ones(count), torch.ones(size * count)
        handles = [
            group.all_reduce(tensor),
            group.all_gather(rows, torch.ones(count)),
            group.all_to_all(torch.ones(size * count), rows.clone()),
            group.broadcast(torch.ones(count), chance.randrange(size)),
            group.recv(torch.ones(count), (rank - 1) % size),
            group.send(tensor.clone(), (rank + 1) % size),
        ]
        chance.shuffle(handles)
        for handle in handles:
            handle.wait()


def member(transport: str, rank: int, size: int, folder: str, seed: int, says: int) -> None:
    """A forked process: it says "." once it works, and how it ended."""
    torch.set_num_threads(1)
    try:
        group = join(transport, rank, size, folder)
        os.write(says, b".")
        work(group, seed)
    except GroupError as error:
        os.write(says, f"{time.monotonic()} {error}".encode())
    os._exit(0)


def trial(transport: str, blow: signal.Signals, size: int, chance: random.Random) -> tuple[float, list[str]]:
    """One blow; seconds until the last survivor gave up, and what was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        seed, members = chance.randrange(1 << 30), []
        for rank in range(size):
            hears, says = os.pipe()
            pid = os.fork()
            if pid == 0:
                member(transport, rank, size, folder, seed, says)
            os.close(says)
            members.append((pid, hears))
        faults = [
            f"member {rank} did not start" for rank, (_, hears) in enumerate(members) if os.read(hears, 1) != b"."
        ]
        time.sleep(chance.uniform(0, 0.1))
        victim = chance.randrange(size)
        struck = time.monotonic()
        os.kill(members[victim][0], blow)
        last = 0.0
        for rank, (pid, hears) in enumerate(members):
            if rank == victim:
                continue
            left = struck + DEADLINE + 3.0 - time.monotonic()
            said = os.read(hears, 4096).decode() if select.select([hears], [], [], max(0.0, left))[0] else ""
            ended, _, error = said.partition(" ")
            if not error:
                faults.append(f"member {rank} hangs, or died without an error")
                os.kill(pid, signal.SIGKILL)
                continue
            last = max(last, float(ended) - struck)
        if last > DEADLINE + 2.0:  # that long on a busy machine
            faults.append(f"the last survivor took {last:.2f} s")
        os.kill(members[victim][0], signal.SIGKILL)
        for pid, hears in members:
            os.waitpid(pid, 0)
            os.close(hears)
    return last, faults


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=50)
    options.add_argument("--stops", type=int, default=20)
    options.add_argument("--size", type=int, default=3)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    before, faults, chance = set(Path("/dev/shm").iterdir()), [], random.Random(chosen.seed)
    for transport in ("shm", "gloo"):
        for name, blow, count in (("kills", signal.SIGKILL, chosen.kills), ("stops", signal.SIGSTOP, chosen.stops)):
            times = []
            for _ in range(count):
                last, wrong = trial(transport, blow, chosen.size, chance)
                times.append(last)
                faults += [f"{transport} {name}: {text}" for text in wrong]
            if times:
                print(
                    f"{transport:5} {count:3} {name}: the last survivor gave up after {statistics.median(times):.3f} s "
                    f"(median), {max(times):.3f} s (worst)"
                )
    left = set(Path("/dev/shm").iterdir()) - before
    faults += [f"{path} is left" for path in left]
    print(*(faults or ["no hang, no process left, nothing in /dev/shm"]), sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
