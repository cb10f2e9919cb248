"""Runs that lose two of four replicas for twenty steps and get them back: the losses must be those without the loss.

    python -m tests.long.elastic [LAYOUT ...] [--steps N] [--no-hosts]

Each layout runs on a Ray of two nodes, of which one is removed after step 10 and added again after step 30. Both are on
this machine, so snapshots in memory outlive a node. Then the same happens with hosts of their own, whose snapshots are
lost with them, so that the run goes back to its last checkpoint. Exit code 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import tempfile
from dataclasses import replace

import ray
from ray.cluster_utils import Cluster

import raypar as rp
from raypar.config.run import world_of
from raypar.job import starter
from raypar.job.layouts import with_replicas
from tests.support.clusters import PORT, RAY, HostCluster, cluster_of_hosts
from tests.support.full_cluster import wait_for_actors
from tests.support.hosts import missing

DENSE = rp.GPT(layers=4, hidden=64, heads=4, seq=32, dropout=0.1)
EXPERTS = replace(DENSE, moe=rp.MoE(experts=4, top_k=2))
LAYOUTS = {
    **{f"dp4-zero{zero}": rp.Run(model=DENSE, mesh=rp.Mesh(dp=4), zero=zero) for zero in (0, 1, 2, 3)},
    "pp2-dp4": rp.Run(model=DENSE, mesh=rp.Mesh(pp=2, dp=4)),
    "pp2-dp4-zero3": rp.Run(model=DENSE, mesh=rp.Mesh(pp=2, dp=4), zero=3),
    "tp2-dp4": rp.Run(model=DENSE, mesh=rp.Mesh(tp=2, dp=4)),
    "ep4": rp.Run(model=EXPERTS, mesh=rp.Mesh(dp=4, ep=4)),
    "expert-actors": rp.Run(model=EXPERTS, mesh=rp.Mesh(dp=4, expert_actors=2)),
    "servers": rp.Run(model=DENSE, mesh=rp.Mesh(pp=2, dp=4), data_parallel="parameter_server"),
}
LOST, BACK = 10, 30  # steps taken before
CLOSE = 1e-6  # relative


class Told(logging.Handler):
    """What the run has logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def check(what: str, holds: bool, told: str = "") -> bool:
    print(f"{'ok' if holds else 'FAILED'}: {what}{'' if holds else chr(10) + told}", flush=True)
    return holds


def farthest(one: list[float], other: list[float]) -> float:
    """Return the largest relative difference of losses; infinity if there are not equally many."""
    if len(one) != len(other):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def is_elastic(name: str, run: rp.Run) -> bool:
    """Train a layout with a node that goes and comes back, and without; return whether the losses agree."""
    world, half = world_of(run), world_of(with_replicas(run, 2)).size
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": half, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=world.size - half)]
    told = Told()
    logging.getLogger("raypar").addHandler(told)
    ray.init(address=cluster.address, namespace="raypar", log_to_driver=False, logging_level="ERROR")
    smaller = list[int]()
    try:
        with rp.launch(run) as job:

            def watch(outcome: rp.Report | rp.Evaluation) -> None:
                taken = job.next_step
                if job.schedule.num_microbatches > run.microbatches:
                    smaller.append(taken)
                if taken == LOST and nodes:
                    cluster.remove_node(nodes.pop(), allow_graceful=False)
                elif taken == BACK and not nodes:
                    nodes.append(cluster.add_node(num_cpus=world.size - half))
                    wait_for_actors(job, world.size)

            losses = [report.loss for report in job.train(on=watch)]
            failures = list(map(str, job.failures))
            job.reset(run)
            whole = [report.loss for report in job.train()]
    finally:
        logging.getLogger("raypar").removeHandler(told)
        ray.shutdown()
        cluster.shutdown()
    grown = [line for line in told.lines if "the run is whole again" in line]
    apart = farthest(losses, whole)
    what = f"{name}: losses apart by {apart:.1e}, {len(smaller)} steps with half the replicas; {'; '.join(failures)}"
    told_all = "\n".join([*told.lines, f"{losses}", f"{whole}"])
    return check(f"{what}; {''.join(grown)}", apart <= CLOSE and len(smaller) >= BACK - LOST and bool(grown), told_all)


DRIVER = """
import logging, sys, time
import raypar as rp

logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
disturbed, folder = sys.argv[1] == "disturbed", sys.argv[2]
kept = {"folder": folder, "save_every": 5} if disturbed else {}
run = rp.recipe("gpt-tiny", mesh=rp.Mesh(dp=4), steps=100, microbatches=2, max_failures=4, timeout=20.0, **kept)
chaos = [rp.chaos.drop_node(f"dp={dp}", at="0B1", step=11) for dp in (2, 3)] if disturbed else []

def pace(outcome):
    if isinstance(outcome, rp.Report):
        print("taken", job.next_step, "with", job.schedule.num_microbatches, flush=True)
        if job.schedule.num_microbatches > 2 and job.next_step > 30:
            time.sleep(1.0)

with rp.launch(run, chaos=chaos) as job:
    losses = [report.loss for report in job.train(on=pace)]
print("losses", *losses)
"""


def losses_of(said: str) -> list[float]:
    return [float(word) for line in said.splitlines() if line.startswith("losses ") for word in line.split()[1:]]


def are_hosts_elastic() -> bool:
    """Kill Ray on two of four hosts, start it there again, and return whether the losses are those without that."""
    names = ("head", "first", "second", "third", "fourth")
    folder = tempfile.mkdtemp(dir="/var/tmp", prefix="raypar-")  # that all hosts see
    with cluster_of_hosts(*names, cpus=(0, 1, 1, 1, 1)) as cluster:
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
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--no-hosts", action="store_true")
    chosen = parser.parse_args()
    starter._LOOK = 0.0
    settings = {"steps": chosen.steps, "microbatches": 2, "max_failures": 3, "timeout": 30.0}
    holds = [is_elastic(name, replace(LAYOUTS[name], **settings)) for name in chosen.layouts or LAYOUTS]
    if lacks := missing():
        print(f"hosts skipped: {lacks}")
    elif not chosen.no_hosts:
        holds.append(are_hosts_elastic())
    return 0 if all(holds) else 1


if __name__ == "__main__":
    sys.exit(main())
