"""Take nodes away with notice from runs on several hosts: they move, go on with fewer replicas, or are saved and end.

    python -m tests.long.preemption

The hosts are Linux namespaces (tests/support/hosts.py). Notice is given as a cloud's or an autoscaler's is (``ray
drain-node``), and as Kubernetes gives it: SIGTERM to ``ray start --block``, which then drains its node. In the end the
host is killed. Losses must be those of an undisturbed run, and nothing may count as a failure. Exit code 1 otherwise.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.clusters import PORT, RAY, HostCluster, cluster_of_hosts
from tests.support.hosts import Host, missing

NOTICE = 20  # seconds
STEPS = 400
DRIVER = """
import json, logging, sys, time
import raypar as rp

class Told(logging.Handler):
    def emit(self, record): print(f"{time.time():.2f} {record.getMessage()}", flush=True)
logging.getLogger("raypar").addHandler(Told(logging.WARNING))
words = json.loads(sys.argv[1])
model = rp.GPT(layers=2, hidden=32, heads=2, seq=16, dropout=0.1)
mesh, pause = rp.Mesh(**words.pop("mesh")), words.pop("pause")
run = rp.Run(model=model, mesh=mesh, microbatches=2, timeout=30.0, **words)
losses = []
def watch(report):
    losses.append(report.loss)
    if report.step == 5:
        print("ready", [row.node for row in job.who()], flush=True)
    time.sleep(pause)
with rp.launch(run) as job:
    job.train(on=watch)
    print("losses", json.dumps(losses), flush=True)
    print("failures", [str(failure) for failure in job.failures], flush=True)
"""
NODE = """
import sys, ray
ray.init("auto", logging_level="ERROR", log_to_driver=False)
print(*(node["NodeID"] for node in ray.nodes() if node["NodeManagerHostname"] == sys.argv[1]))
"""


@dataclass
class Told:
    """What a driver has printed."""

    lines: list[str] = field(default_factory=list)

    def line(self, what: str) -> str:
        """Return the first line that has a text; "" if there is none."""
        return next((line for line in self.lines if what in line), "")

    @property
    def losses(self) -> list[float]:
        found = self.line("losses ")
        return json.loads(found.removeprefix("losses ")) if found else []


def trained(
    cluster: HostCluster,
    mesh: dict[str, int],
    takes: Callable[[Host], threading.Timer | None] | None = None,
    *,
    failures: int = 1,
    folder: str | None = None,
) -> Told:
    """Train, and take the node away on which the last actor is; return what was told, and the losses."""
    pause = 0.0 if takes is None else 0.1
    words = {"mesh": mesh, "steps": STEPS, "max_failures": failures, "pause": pause, "folder": folder}
    command = [sys.executable, "-u", "-c", DRIVER, json.dumps(words)]
    driver = cluster.head.start(*command, env=cluster.driver_env)
    told, dies = Told(), None
    ends = threading.Timer(200.0, driver.kill)
    ends.start()
    assert driver.stdout is not None
    for line in driver.stdout:
        told.lines.append(line.rstrip())
        if line.startswith("ready") and takes is not None:
            name = line.rpartition("'")[0].rpartition("'")[2]
            dies = takes(next(host for host in cluster.network.hosts if host.name == name))
    ends.cancel()
    if dies is not None:
        dies.cancel()
    told.lines.append(f"exit code {driver.wait()}")
    return told


def drained(cluster: HostCluster) -> Callable[[Host], threading.Timer]:
    """Return what drains a host, and kills it when its time is over."""

    def take(host: Host) -> threading.Timer:
        where = f"--address={cluster.head.address}:{PORT}"
        node = cluster.drive("-c", NODE, host.name).split()[-1]
        why = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot"]
        when = f"--deadline-remaining-seconds={NOTICE}"
        cluster.head.run(RAY, "drain-node", where, f"--node-id={node}", *why, when, env=cluster.env)
        dies = threading.Timer(NOTICE, host.die)
        dies.start()
        return dies

    return take


def terminated(host: Host) -> None:
    """Send SIGTERM to ``ray start --block`` on a host."""
    host.run("sh", "-c", "kill -TERM $(pgrep -f 'ray start' | head -1)")


def check(what: str, told: Told, *, holds: bool) -> bool:
    print(f"{'ok' if holds else 'FAILED'}: {what}", flush=True)
    for line in told.lines:
        if not holds or "taken away" in line or "the run has moved" in line:
            print(f"    {line[:400]}", flush=True)
    return holds


def seconds_to_move(told: Told) -> float:
    """Return the seconds from the notice until the run has moved."""
    heard, moved = told.line("is taken away"), told.line("the run has moved")
    return float(moved.split()[0]) - float(heard.split()[0]) if heard and moved else -1.0


def is_moved(how: str) -> bool:
    """Take the node of a pipeline's last stage away, with a third one at hand."""
    blocks = ("second", "third") if how == "SIGTERM" else ()
    with cluster_of_hosts("first", "second", "third", cpus=(1, 1, 1), blocks=blocks) as cluster:
        whole = trained(cluster, {"pp": 2})
        moved = trained(cluster, {"pp": 2}, drained(cluster) if how == "drain" else terminated)
    seconds, same = seconds_to_move(moved), moved.losses == whole.losses and len(whole.losses) == STEPS
    what = f"{how}: a pipeline moves to a third host, {seconds:.1f} s after the notice, with the same bits"
    return check(what, moved, holds=same and bool(moved.line("failures []")) and seconds > 0)


def main() -> int:
    """Do all of it."""
    if lacks := missing():
        print(f"skipped: {lacks}")
        return 0
    results, pp = [is_moved("drain"), is_moved("SIGTERM")], {"pp": 2}
    with cluster_of_hosts("first", "second", cpus=(1, 1)) as cluster:
        whole, fewer = trained(cluster, {"dp": 2}), trained(cluster, {"dp": 2}, drained(cluster))
    apart = max((abs(a - b) / b for a, b in zip(fewer.losses, whole.losses, strict=False)), default=1.0)
    seconds = seconds_to_move(fewer)
    what = f"no room: one replica of two goes on, {seconds:.1f} s after the notice, losses apart by {apart:.0e}"
    holds = apart < 1e-6 and len(fewer.losses) == STEPS and bool(fewer.line("failures []"))
    results.append(check(what, fewer, holds=holds))
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp", prefix="raypar-") as folder,
        cluster_of_hosts("first", "second", cpus=(1, 1)) as cluster,
    ):
        saved = trained(cluster, pp, drained(cluster), failures=0, folder=f"{folder}/run")
    holds = bool(saved.line(": saved as step-")) and bool(saved.line("To go on, launch the run again with resume="))
    results.append(check("no room for a replica: the run is saved, and says how it goes on", saved, holds=holds))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
