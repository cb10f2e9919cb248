"""Replicas on four hosts with slow links: raypar's ZeRO levels, those of another tree of it, and torch's FSDP2 on Gloo.

    python -m tests.bench.four_hosts [--before TREE] [--zero 1 3] [--rate 1gbit] [--rounds 3] [--steps 4]

The hosts are namespaces of this machine, with one replica of a GPT of 49 M parameters each. In every round each
contestant is launched once, takes two steps that do not count, and then so many that do; every other round goes through
the contestants backwards. As root, on Linux.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.arguments import parse_words, parser_of
from tests.bench.processes import LAUNCH, Processes
from tests.support.clusters import ENV, PORT, ROOT, cluster_of_hosts
from tests.support.hosts import hosts_on_a_network, missing

HOSTS = ("one", "two", "three", "four")
_WARM = 2  # steps of a launch that do not count
_STEP = 120.0  # seconds that a step may take


def train(loop: str, zero: int, rank: int, hidden: int) -> None:
    """Train as one of a contestant's processes, and answer requests on the standard output."""
    import torch

    import raypar as rp
    from raypar.actors.machine.device import ComputeDevice
    from tests.bench.ours import RayparTrainer
    from tests.bench.peers.fsdp import fsdp
    from tests.bench.trainer import serve

    tree = Path(os.environ["PYTHONPATH"])
    if not Path(rp.__file__).is_relative_to(tree):
        raise RuntimeError(f"raypar is not that of {tree}, but {rp.__file__}: hosts see no folder below /tmp")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed goes to the log
    torch.set_num_threads(1)
    fields: dict[str, Any] = {"microbatches": 1, "micro_batch_size": 1, "mesh": rp.Mesh(dp=len(HOSTS))}
    if loop == "raypar":
        fields["zero"] = zero
    model = rp.GPT(layers=10, hidden=hidden, heads=hidden // 64, seq=64)
    run = rp.Run(model=model, optim=rp.AdamW(lr=3e-4), device="cpu", **fields)
    trainer = RayparTrainer(run) if loop == "raypar" else fsdp(run, ComputeDevice())
    serve(trainer, [f'["train", 0, {_WARM}]'], answers)
    serve(trainer, sys.stdin, answers)
    trainer.close()


class Entered(NamedTuple):
    """A contestant.

    Attributes:
        name: What the table calls it.
        tree: The tree of raypar whose code it runs.
        zero: The ZeRO level; 0 is FSDP2.
    """

    name: str
    tree: Path
    zero: int


@contextmanager
def launched(entered: Entered, rate: str, hidden: int, folder: Path) -> Iterator[Processes]:
    """Start a contestant's processes on hosts of its own, all of which end with the context."""
    words = [sys.executable, "-P", str(Path(__file__).resolve()), "--hidden", str(hidden), "--child"]
    env = {**ENV, "PYTHONPATH": str(entered.tree), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        if entered.zero:
            cluster = stack.enter_context(cluster_of_hosts(*HOSTS, cpus=[1] * len(HOSTS), env=env))
            network, env = cluster.network, env | {"RAY_ADDRESS": f"{cluster.head.address}:{PORT}"}
            commands = [[*words, "raypar", str(entered.zero), "0"]]
        else:
            network = stack.enter_context(hosts_on_a_network(*HOSTS))
            commands = [[*words, "fsdp", "0", str(rank)] for rank in range(len(HOSTS))]
            env |= {"WORLD_SIZE": str(len(HOSTS)), "MASTER_ADDR": network.hosts[0].address, "MASTER_PORT": "29400"}
            env["GLOO_SOCKET_IFNAME"] = "eth0"
        network.limit(rate)
        on_hosts = [host.command(command) for host, command in zip(network.hosts, commands, strict=False)]
        processes = Processes(entered.name, on_hosts, folder, env)
        stack.callback(processes.kill)
        yield processes
        processes.close()


def main(words: Sequence[str] | None = None) -> None:
    """Measure all contestants in turn, and print the seconds of a step of each beside those of FSDP2."""
    parser = parser_of(__doc__)
    parser.add_argument("--before", type=Path, help="another tree of raypar, to be measured beside this one")
    parser.add_argument("--zero", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--rate", default="1gbit", help="of each host's link, both ways")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=640)
    parser.add_argument("--child", nargs=3, metavar=("LOOP", "ZERO", "RANK"), help="one process of a contestant")
    asked = parse_words(parser, words, "--hidden 64 --rounds 1 --steps 1 --zero 1")
    if asked.child:
        train(asked.child[0], int(asked.child[1]), int(asked.child[2]), asked.hidden)
        return
    if lacks := missing():
        print(f"skipped: {lacks}")
        return
    trees = {"now": ROOT} | ({"before": asked.before.resolve()} if asked.before else {})
    entered = [Entered("FSDP2", ROOT, 0)]
    entered += [Entered(f"zero={zero} {name}", tree, zero) for zero in asked.zero for name, tree in trees.items()]
    seconds: dict[str, list[float]] = {one.name: [] for one in entered}
    with tempfile.TemporaryDirectory(prefix="raypar-hosts-") as folder:
        for number in range(asked.rounds):
            for one in entered[:: 1 if number % 2 == 0 else -1]:
                with launched(one, asked.rate, asked.hidden, Path(folder)) as processes:
                    processes.answers(LAUNCH)
                    for step in range(asked.steps):
                        taken = processes.ask("train", _WARM + step, 1, seconds=_STEP)
                        seconds[one.name].append(max(answer["seconds"] for answer in taken))
    peer = statistics.median(seconds["FSDP2"])
    for name, found in seconds.items():
        median = statistics.median(found)
        print(f"{name}: {median:.3f} s a step ({min(found):.3f} to {max(found):.3f}), {median / peer:.2f} of FSDP2")


if __name__ == "__main__":
    main()
