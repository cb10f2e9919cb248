"""Runs that lose one or two of four replicas for twenty steps and get them back: the losses must be those without that.

    python -m tests.long.elastic [LAYOUT ...] [--steps N] [--events N] [--seed N] [--hosts]

Each layout runs on a Ray of two nodes, of which one is removed after step 10, and added again when twenty steps were
taken with the other replicas. Both are on this machine, so snapshots in memory outlive a node. Then one run loses and
gets nodes and actors at random (``--events``, which are drawn anew from the seed), also while it loses and gets others.
With ``--hosts`` nodes are hosts of their own at last, whose snapshots are lost with them, and the run goes back to its
last checkpoint. Exit code 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import ray
from ray.cluster_utils import Cluster

import raypar as rp
from raypar.actors.specs.worlds import world_of
from raypar.cluster.lifecycle import replacement_actors as vacancies
from raypar.job.layout.elastic import with_replicas
from raypar.job.recover import restarts as starter
from tests.support.clusters import PORT, RAY, HostCluster, cluster_of_hosts
from tests.support.full_cluster import wait_for_actors
from tests.support.hosts import missing

DENSE = rp.GPT(layers=4, hidden=64, heads=4, seq=32, dropout=0.1)
EXPERTS = replace(DENSE, moe=rp.MoE(experts=4, top_k=2))
LAYOUTS = {
    "dp4-zero0": rp.Run(model=DENSE, mesh=rp.Mesh(dp=4), zero=0),
    "dp4-zero2": rp.Run(model=DENSE, mesh=rp.Mesh(dp=4), zero=2),
    "pp2-dp4": rp.Run(model=DENSE, mesh=rp.Mesh(pp=2, dp=4)),
    "pp2-dp4-zero3": rp.Run(model=DENSE, mesh=rp.Mesh(pp=2, dp=4), zero=3),
    "tp2-dp4": rp.Run(model=DENSE, mesh=rp.Mesh(tp=2, dp=4)),
    "ep4": rp.Run(model=EXPERTS, mesh=rp.Mesh(dp=4, ep=4)),
    "expert-actors": rp.Run(model=EXPERTS, mesh=rp.Mesh(dp=4, expert_actors=2)),
    "servers": rp.Run(model=DENSE, mesh=rp.Mesh(pp=2, dp=4), data_parallel="parameter_server"),
    "three of dp4-zero1": rp.Run(model=DENSE, mesh=rp.Mesh(dp=4), zero=1),
    "three of dp4-zero2": rp.Run(model=DENSE, mesh=rp.Mesh(dp=4), zero=2),
    "three of dp4-zero3": rp.Run(model=DENSE, mesh=rp.Mesh(dp=4), zero=3),
    "three of pp2-dp4-hybrid": rp.Run(model=DENSE, mesh=rp.Mesh(pp=2, dp=4, shard=2), zero=2),
}
LOST, FEWER = 10, 20  # steps taken before, and with fewer replicas
CLOSE = 1e-6  # relative


class Nodes:
    """A Ray of several nodes, all on this machine.

    Args:
        head: CPUs of the node that stays.
        others: CPUs of the others.

    Attributes:
        others: The nodes that may go.
    """

    def __init__(self, head: int, others: list[int]) -> None:
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": head, "include_dashboard": False})
        self.others = [self._cluster.add_node(num_cpus=cpus) for cpus in others]
        ray.init(address=self._cluster.address, namespace="raypar", log_to_driver=False, logging_level="ERROR")

    def remove(self) -> None:
        """End the last node with all that runs on it."""
        self._cluster.remove_node(self.others.pop(), allow_graceful=False)

    def add(self, cpus: int) -> None:
        """Start another node."""
        self.others.append(self._cluster.add_node(num_cpus=cpus))

    def close(self) -> None:
        """End all of it."""
        ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def nodes_of(head: int, others: list[int]) -> Iterator[Nodes]:
    """Make a Ray of several nodes for the time of the context."""
    nodes = Nodes(head, others)
    try:
        yield nodes
    finally:
        nodes.close()


@contextmanager
def heard() -> Iterator[Listener]:
    """Listen to what runs log within the context."""
    log = Listener()
    logging.getLogger("raypar").addHandler(log)
    try:
        yield log
    finally:
        logging.getLogger("raypar").removeHandler(log)


class Listener(logging.Handler):
    """What the run has logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def check(what: str, holds: bool, log: str = "") -> bool:
    print(f"{'ok' if holds else 'FAILED'}: {what}{'' if holds else chr(10) + log}", flush=True)
    return holds


def farthest(one: list[float], other: list[float]) -> float:
    """Return the largest relative difference of losses; infinity if there are not equally many."""
    if len(one) != len(other):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def is_elastic(name: str, run: rp.Run) -> bool:
    """Train a layout with a node that goes and comes back, and without; return whether the losses agree."""
    left = 3 if name.startswith("three") else 2
    run = replace(run, microbatches=12 // run.mesh.dp) if left == 3 else run
    world, fewer = world_of(run), world_of(with_replicas(run, left)).size
    smaller = list[int]()
    with nodes_of(fewer, [world.size - fewer]) as cluster, heard() as log, rp.launch(run) as job:

        def watch(outcome: rp.Report | rp.Evaluation) -> None:
            if job.schedule.num_microbatches > run.microbatches:
                smaller.append(job.next_step)
            if job.next_step == LOST and cluster.others:
                cluster.remove()
            elif len(smaller) == FEWER and not cluster.others:
                cluster.add(world.size - fewer)
                wait_for_actors(job, world.size)

        losses = [report.loss for report in job.train(on=watch)]
        failures = list(map(str, job.failures))
        job.reset(run)
        whole = [report.loss for report in job.train()]
    grown = [line for line in log.lines if "the run is whole again" in line]
    apart = farthest(losses, whole)
    what = f"{name}: losses apart by {apart:.1e}, {len(smaller)} steps with {left} replicas; {'; '.join(failures)}"
    all_lines = "\n".join([*log.lines, f"{losses}", f"{whole}"])
    return check(f"{what}; {''.join(grown)}", apart <= CLOSE and len(smaller) == FEWER and bool(grown), all_lines)


def is_storm_survived(run: rp.Run, events: int, seed: int) -> bool:
    """Let nodes come and go and actors die at random, and return whether the losses are those of a calm run."""
    world, draw = world_of(run), Random(seed)
    spots = [(step, draw.choice(["node", "node", "kill"])) for step in range(5, 5 + 7 * events, 7)]
    run = replace(run, steps=spots[-1][0] + 10, max_failures=10 * events)
    labels = [world.label(rank) for rank in range(world.size)]
    chaos = [rp.chaos.kill(draw.choice(labels), at="STEP", step=step) for step, kind in spots if kind == "kill"]
    chaos += [rp.chaos.kill(labels[-1], at="start", step=step) for step in range(3, events, 3)]  # in moves too
    with (
        nodes_of(world.size // 2, [world.size - world.size // 2]) as cluster,
        heard() as log,
        rp.launch(run, chaos=chaos) as job,
    ):
        sizes = Counter[int]()

        def watch(outcome: rp.Report | rp.Evaluation) -> None:
            sizes[job.schedule.num_microbatches] += 1
            if (job.next_step, "node") in spots:
                if cluster.others:
                    cluster.remove()
                else:
                    cluster.add(world.size - world.size // 2)
                    if draw.random() < 0.7:  # else actors come while the run goes on
                        wait_for_actors(job, world.size)

        losses = [report.loss for report in job.train(on=watch)]
        count = len(job.failures)
        job.reset(replace(run, mesh=replace(run.mesh, dp=1), microbatches=run.microbatches * run.mesh.dp))
        whole = [report.loss for report in job.train()]
    apart, grown = farthest(losses, whole), sum("the run is whole again" in line for line in log.lines)
    what = f"{events} events at random: losses apart by {apart:.1e}, {count} failures, whole again {grown} times, "
    what += ", ".join(f"{steps} steps with {size} microbatches a replica" for size, steps in sorted(sizes.items()))
    return check(what, apart <= CLOSE and count > 0 and grown > 0, "\n".join(log.lines))


DRIVER = """
import logging, sys
import raypar as rp
from raypar.job.recover import restarts as starter
from tests.support.full_cluster import wait_for_actors

starter._LOOK = 0.0
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
disturbed, folder = sys.argv[1] == "disturbed", sys.argv[2]
kept = {"folder": folder, "save_every": 5} if disturbed else {}
run = rp.recipe("gpt-tiny", mesh=rp.Mesh(dp=4), steps=50, microbatches=2, max_failures=4, timeout=20.0, **kept)
chaos = [rp.chaos.drop_node(f"dp={dp}", at="0B1", step=11) for dp in (2, 3)] if disturbed else []

def watch(outcome):
    if isinstance(outcome, rp.Report):
        print("taken", job.next_step, "with", job.schedule.num_microbatches, flush=True)
        if job.next_step == 30 and job.schedule.num_microbatches > 2:
            wait_for_actors(job, 4, 240.0)

with rp.launch(run, chaos=chaos) as job:
    losses = [report.loss for report in job.train(on=watch)]
print("losses", *losses)
"""


def losses_of(said: str) -> list[float]:
    return [float(word) for line in said.splitlines() if line.startswith("losses ") for word in line.split()[1:]]


def are_hosts_elastic() -> bool:
    """Kill Ray on two of four hosts, start it there again, and return whether the losses are those without that.

    It is away for twenty steps. In many more, gpt-tiny itself makes what rounding differs by a thousand times larger.
    """
    names = ("head", "first", "second", "third", "fourth")
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp", prefix="raypar-") as folder,  # that all hosts see
        cluster_of_hosts(*names, cpus=(0, 1, 1, 1, 1)) as cluster,
    ):
        whole = losses_of(cluster.drive("-u", "-c", DRIVER, "undisturbed", folder, timeout=300))
        words = ["-u", "-c", DRIVER, "disturbed", f"{folder}/run"]
        run = cluster.head.start(sys.executable, *words, env=cluster.driver_env)
        assert run.stdout is not None
        said = list[str]()
        for line in run.stdout:
            said.append(line)
            if line.startswith("taken 30 with 4"):
                start_again(cluster)
        run.wait(60)
    text = "".join(said)
    apart, grown = farthest(losses_of(text), whole), re.findall("the run is whole again.*", text)
    survived = re.findall("the run goes on.*", text)
    what = f"hosts: losses apart by {apart:.1e}; {'; '.join(survived + grown)}"
    return check(what, apart <= CLOSE and bool(grown), text)


def start_again(cluster: HostCluster) -> None:
    """Start Ray on the hosts on which it does not run."""
    for host in cluster.network.hosts[1:]:
        if host.run("sh", "-c", "pgrep -c raylet || true").strip() == "0":
            address = f"{cluster.head.address}:{PORT}"
            options = [f"--address={address}", f"--node-ip-address={host.address}", "--num-cpus=1"]
            host.run(RAY, "start", *options, "--object-store-memory=80000000", "--disable-usage-stats", env=cluster.env)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--events", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", action="store_true")
    chosen = parser.parse_args()
    starter._LOOK, vacancies._ROOM = 0.0, 2.0
    settings = {"steps": chosen.steps, "microbatches": 2, "max_failures": 3, "timeout": 30.0}
    holds = [is_elastic(name, replace(LAYOUTS[name], **settings)) for name in chosen.layouts or LAYOUTS]
    if chosen.events:
        run = replace(LAYOUTS["pp2-dp4"], mesh=rp.Mesh(pp=1, dp=4), **settings)
        holds.append(is_storm_survived(run, chosen.events, chosen.seed))
    if chosen.hosts and (lacks := missing()):
        print(f"hosts skipped: {lacks}")
    elif chosen.hosts:
        holds.append(are_hosts_elastic())
    return 0 if all(holds) else 1


if __name__ == "__main__":
    sys.exit(main())
