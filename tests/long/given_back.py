"""What a run leaves is free at once: nodes that it leaves become idle and end, and no demand for others stays behind.

    python -m tests.long.given_back

On Ray's autoscaler with nodes that are processes of this machine: a run for which nodes come, of which one is drained;
one that loses a node and goes on with fewer replicas until another one has come; a relayout and a reset to fewer
actors. After each, every placement group has an actor of the run in each of its bundles, nodes without actors are ended
by the autoscaler as idle, and none is added. Exit code 1 if anything is not so.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray
from ray.util.placement_group import placement_group_table

import raypar as rp
from raypar.cluster.lifecycle.replacement_actors import nodes_of
from tests.support.clusters import RAY
from tests.support.process_tree import command_line, every_process

PORT = 26379
MODEL = rp.GPT(layers=4, hidden=16, heads=2, seq=8)
RUN = rp.Run(MODEL, mesh=rp.Mesh(pp=3), microbatches=3, split=(2, 1, 1), steps=100_000, max_failures=3, timeout=60.0)
PATIENT = 120.0  # seconds for what Ray's autoscaler does
STAYS = 8.0  # seconds in which no node may be added


def config(workers: int) -> dict[str, object]:
    """Return the autoscaler's configuration: so many nodes of one CPU besides the head, which has one too."""
    kinds = {
        "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
        "worker": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": workers},
    }
    provider = {
        "type": "fake_multinode",
        "use_node_id_as_ip": True,
        "gcs_address": f"127.0.0.1:{PORT}",
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        **{f"{kind}_commands": [] for kind in commands},
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "rsync_exclude": [],
        "rsync_filter": [],
        "file_mounts_sync_continuously": False,
        "cluster_name": "given-back",
        "max_workers": workers,
        "upscaling_speed": 5.0,
        "idle_timeout_minutes": 0.1,
        "provider": provider,
        "available_node_types": kinds,
        "head_node_type": "ray.head.default",
    }


@contextmanager
def autoscaled(workers: int) -> Iterator[None]:
    """Start Ray with its autoscaler, and connect to it, for the time of the context."""
    folder = Path(tempfile.mkdtemp(prefix="given-back-", dir="/tmp"))
    settings = folder / "autoscaler.json"
    settings.write_text(json.dumps(config(workers)))
    env = os.environ | {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "RAY_AUTH_MODE": "disabled"}
    start = [RAY, "start", "--head", "--num-cpus=1", f"--port={PORT}", f"--temp-dir={folder}/ray"]
    start += [f"--autoscaling-config={settings}", "--include-dashboard=false", "--object-store-memory=80000000"]
    try:
        subprocess.run(start, env=env, check=True, stdout=subprocess.DEVNULL, timeout=120)
        os.environ["RAY_AUTH_MODE"] = "disabled"
        ray.init(address=f"127.0.0.1:{PORT}", namespace="raypar", log_to_driver=False, logging_level="ERROR")
        yield
    finally:
        ray.shutdown()
        for pid in every_process():
            if pid != os.getpid() and str(folder) in command_line(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def alive() -> set[str]:
    """Return Ray's ids of the nodes that live."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def wanted() -> list[str]:
    """Return the states of placement groups that wait for nodes."""
    states = [group["state"] for group in placement_group_table().values()]
    return [state for state in states if state not in ("CREATED", "REMOVED")]


def bundles() -> list[str]:
    """Return the node of each bundle that is claimed."""
    groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
    return sorted(node for group in groups for node in group["bundles_to_node_id"].values())


def until(is_so: Callable[[], bool], job: rp.Job) -> float:
    """Take steps until something is so; return after how many seconds, infinity if it does not become so."""
    begin = time.monotonic()
    while not is_so():
        if time.monotonic() - begin > PATIENT:
            return float("inf")
        job.train(3)
        time.sleep(0.1)
    return time.monotonic() - begin


def check(what: str, *, holds: bool) -> bool:
    print(f"{'ok' if holds else 'FAILED'}: {what}", flush=True)
    return holds


def is_given_back(job: rp.Job, actors: int, what: str, left: str = "") -> bool:
    """Return whether a job has as many bundles as actors, where they are, and whether other nodes end as idle."""
    used = lambda: sorted(nodes_of(job._lifetime.actors.bundles))  # noqa: E731
    oks = [check(f"{what}: {actors} bundles, where its {actors} actors are", holds=bundles() == used())]
    oks += [check(f"{what}: no bundle on the node that was left", holds=left not in bundles())]
    head = ray.get_runtime_context().get_node_id()
    ends = until(lambda: alive() == {head, *used()}, job)
    oks.append(check(f"{what}: nodes without actors have ended {ends:.0f} s later", holds=ends < PATIENT))
    before, end = alive(), time.monotonic() + STAYS
    while time.monotonic() < end:
        job.train(2)
    stays = alive() == before and not wanted() and len(bundles()) == actors
    oks.append(check(f"{what}: after that no demand, and no other node in {STAYS:g} s", holds=stays))
    return all(oks)


def drained_and_relaid() -> bool:
    """Train on nodes that come, drain one, relayout to fewer actors, and reset to fewer still."""
    with rp.launch(RUN, wait_for_nodes=PATIENT) as job:
        job.train(3)
        left = nodes_of(job._lifetime.actors.bundles)[2]
        why = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot", "--deadline-remaining-seconds=600"]
        where = [RAY, "drain-node", f"--address=127.0.0.1:{PORT}", f"--node-id={left}", *why]
        subprocess.run(where, check=True, stdout=subprocess.DEVNULL, timeout=60)
        moved = until(lambda: left not in nodes_of(job._lifetime.actors.bundles), job)
        oks = [check(f"a drain: moved after {moved:.0f} s, with a node that came", holds=moved < PATIENT)]
        oks.append(is_given_back(job, 3, "a drain", left))
        job.relayout(mesh=rp.Mesh(pp=2), split="even")
        oks.append(is_given_back(job, 2, "a relayout from pp=3 to pp=2"))
        job.reset(rp.Run(MODEL, mesh=rp.Mesh(), steps=100_000))
        oks.append(is_given_back(job, 1, "a reset to one actor"))
        return all(oks)


def shrunk() -> bool:
    """Train with three replicas, of which one loses its node until another one has come."""
    run = rp.Run(MODEL, mesh=rp.Mesh(dp=3), microbatches=2, steps=100_000, max_failures=3, timeout=30.0)
    with rp.launch(run, wait_for_nodes=PATIENT) as job:
        job.train(3)
        lost = next(n for n in nodes_of(job._lifetime.actors.bundles) if n != ray.get_runtime_context().get_node_id())
        for pid in every_process():
            if "raylet/raylet" in (line := command_line(pid)) and lost in line:
                os.kill(pid, signal.SIGKILL)
        smaller = until(lambda: job.run.mesh.dp == 3 and lost not in nodes_of(job._lifetime.actors.bundles), job)
        oks = [check(f"a lost node: three replicas again after {smaller:.0f} s", holds=smaller < PATIENT)]
        oks.append(is_given_back(job, 3, "a lost node", lost))
        return all(oks)


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="    %(message)s")
    with autoscaled(3):
        oks = [drained_and_relaid()]
    with autoscaled(3):
        oks.append(shrunk())
    return not all(oks)


if __name__ == "__main__":
    sys.exit(main())
