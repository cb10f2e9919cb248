"""Train gpt-small across two hosts: the losses of one host, a link that is limited, and one that is cut.

    python -m tests.long.two_hosts [--recipe gpt-small] [--steps 4] [--rate 100mbit]

The losses of pp=2, dp=2 and tp=2 across hosts must be those of one host to the last bit, and the same with the link
limited; where the link is cut in a run, it must end within the deadline with a reason that names an actor. ``raypar
doctor`` must find the limited link slow; a host that dies is replaced by one that has room; and ``ray symmetric-run``
trains on two hosts. Exit code 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.clusters import ENV, PORT, RAY, HostCluster, cluster_of_hosts
from tests.support.hosts import hosts_on_a_network, missing

LAYOUTS = ("pp", "dp", "tp")
DEADLINE = 30.0  # seconds: the timeout of the run whose link is cut


def train(
    cluster: HostCluster, layout: str, recipe: str, steps: int, *, host: int = 0, alone: bool = False
) -> list[float]:
    """Train and return the losses.

    Args:
        cluster: The cluster.
        layout: The axis that is 2.
        recipe: The recipe.
        steps: Number of steps.
        host: The host of the driver.
        alone: Whether to train on a Ray of the driver's own.
    """
    shape = [word for axis in LAYOUTS for word in (f"--mesh.{axis}", "2" if axis == layout else "1")]
    words = ["-m", "raypar.cli.main", "train", recipe, *shape, "--steps", str(steps), "--log", "/tmp/log"]
    env = {**ENV} if alone else cluster.driver_env
    chosen = cluster.network.hosts[host]
    chosen.run(sys.executable, *words, env=env, timeout=400)
    lines = map(json.loads, chosen.run("cat", "/tmp/log").splitlines())
    return [line["loss"] for line in lines if "grad_norm" in line]


def check(what: str, holds: bool, told: str = "") -> bool:
    print(f"{'ok' if holds else 'FAILED'}: {what}{'' if holds else chr(10) + told}", flush=True)
    return holds


def is_cut_told(cluster: HostCluster, recipe: str) -> bool:
    """Cut the link in a run, and return whether it ended in time with a reason."""
    words = ["train", recipe, "--mesh.pp", "2", "--steps", "100000", "--timeout", str(DEADLINE)]
    command = [sys.executable, "-u", "-m", "raypar.cli.main", *words]
    run = cluster.head.start(*command, env=cluster.driver_env)
    said = []
    assert run.stdout is not None
    for line in run.stdout:
        said.append(line)
        if "step " in line and "loss" in line:
            break
    cluster.network.cut(cluster.network.hosts[1])
    begin = time.monotonic()
    rest, _ = run.communicate(timeout=300)
    seconds = time.monotonic() - begin
    cluster.network.mend(cluster.network.hosts[1])
    last = rest.strip().splitlines()[-12:]
    told = any("pp=" in line for line in last)
    print("\n".join(f"    {line}" for line in last))
    what = f"a cut link ends the run after {seconds:.0f} s, exit code {run.returncode}"
    return check(what, told and seconds < 90, rest)


def is_host_replaced(recipe: str, steps: int) -> bool:
    """Let one of three hosts die in a run that survives failures, and return whether the third took its place.

    The run goes on from its checkpoint, so its losses must be those of a run that nothing happened to.
    """
    with cluster_of_hosts("first", "second", "third", cpus=(1, 1, 1)) as cluster, shared_folder() as folder:
        words = ["train", recipe, "--mesh.pp", "2", "--steps", str(steps)]
        command = [sys.executable, "-u", "-m", "raypar.cli.main", *words]
        wanted = train(cluster, "pp", recipe, steps, host=2, alone=True)
        survives = ["--max-failures", "2", "--save-every", "20", "--folder", f"{folder}/run", "--log", "/tmp/log"]
        run = cluster.head.start(*command, *survives, "--timeout", str(DEADLINE), env=cluster.driver_env)
        assert run.stdout is not None
        head = []
        for line in run.stdout:
            head.append(line)
            if "step " in line and "loss" in line:
                break
        dead = next(host for host in cluster.network.hosts[1:] if f"{host.name} (" in "".join(head))
        dead.die()
        begin = time.monotonic()
        rest, _ = run.communicate(timeout=400)
        logged = [json.loads(line) for line in cluster.head.run("cat", "/tmp/log").splitlines()]
        losses = {line["step"]: line["loss"] for line in logged if "grad_norm" in line}
        what = f"a host that dies is replaced, and the run ends {time.monotonic() - begin:.0f} s later"
        survived = run.returncode == 0 and "replaced" in rest
        return check(what, survived and list(losses.values()) == wanted, "".join(head) + rest)


def is_symmetric(recipe: str) -> bool:
    """Train with ``ray symmetric-run`` on two hosts, as examples/cluster/slurm.sh does; return whether it all ends."""
    with hosts_on_a_network("first", "second") as network:
        address = f"{network.hosts[0].address}:{PORT}"
        path = f"{RAY.parent}:{os.environ['PATH']}"
        env = {**ENV, "RAY_ADDRESS": address, "PATH": path, "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT": "90"}
        options = ["--min-nodes", "2", "--num-cpus=1", "--disable-usage-stats", "--dashboard-host=127.0.0.1"]
        train = ["raypar", "train", recipe, "--mesh.pp", "2", "--steps", "2"]
        command = [RAY, "symmetric-run", "--address", address, *options, "--", *train]
        runs = [host.start(*command, env=env) for host in network.hosts]
        said = [run.communicate(timeout=300)[0] for run in runs]
        left = [
            host.run("sh", "-c", "ps -e -o comm= | grep -cE 'raylet|gcs_server' || true").strip()
            for host in network.hosts
        ]
        holds = "step 2/2" in said[0] and not any(run.returncode for run in runs) and left == ["0", "0"]
        return check("ray symmetric-run trains on two hosts, and leaves nothing", holds, "\n".join([*said, *left]))


@contextmanager
def shared_folder() -> Iterator[str]:
    """Make a folder that all hosts see."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="raypar-") as folder:
        yield folder


LOST = """
import json, sys
import raypar as rp

fields, actor, step = json.loads(sys.argv[1])
fields["mesh"] = rp.Mesh(**fields["mesh"])
run = rp.recipe("gpt-tiny", steps=14, microbatches=2, timeout=20.0, max_failures=int(step > 0), **fields)
at = "STEP" if step == 12 else "1F0"
chaos = [rp.chaos.drop_node(actor, at=at, step=step)] if step else []
with rp.launch(run, chaos=chaos) as job:
    losses = [report.loss for report in job.train()]
    print(json.dumps([losses, [[one.step, one.back_to, one.source, str(one)] for one in job.failures]]))
"""
LOSSES = (  # what runs, the actor whose node is lost, in which step, of how many hosts of one CPU, how close losses are
    ({"mesh": {"pp": 2}, "buddy_every": 4}, "pp=1", 12, 3, 0.0),
    ({"mesh": {"pp": 2}, "buddy_every": 4}, "pp=1", 9, 3, 0.0),  # while a copy is under way
    ({"mesh": {"pp": 2}, "buddy_every": 1, "spares": 1}, "pp=1", 12, 3, 0.0),
    ({"mesh": {"pp": 2}, "buddy_every": 0}, "pp=1", 12, 3, 0.0),
    ({"mesh": {"dp": 2}, "zero": 3, "buddy_every": 4}, "dp=1", 12, 3, 0.0),
    ({"mesh": {"tp": 2}, "buddy_every": 4}, "tp=1", 12, 3, 0.0),
    ({"mesh": {"dp": 2}, "zero": 3, "buddy_every": 4}, "dp=1", 12, 2, 1e-6),
)


def is_loss_survived(fields: dict[str, object], actor: str, lost_in: int, hosts: int, apart: float) -> bool:
    """Kill Ray on one of some hosts in a run without checkpoints, and return whether it goes on from a buddy's copies.

    With three hosts the actor there goes on on the third one; with two, the run goes on with fewer replicas. Without
    copies it begins again. Two runs, with the loss and without, must have the same losses.
    """
    names = ("first", "second", "third")[:hosts]
    with cluster_of_hosts(*names, cpus=(1,) * hosts) as cluster:
        calm = {name: value for name, value in fields.items() if name in ("mesh", "zero")}
        told = [json.dumps(one) for one in ([calm, actor, 0], [fields, actor, lost_in])]
        said = [cluster.drive("-c", LOST, one, timeout=250) for one in told]
    answers = [next(line for line in one.splitlines() if line.startswith("[[")) for one in said]  # Ray prints others
    (whole, _), (losses, failures) = map(json.loads, answers)
    every = int(str(fields["buddy_every"]))
    (step, back_to, source, text), *more = failures
    as_far = step - 1 - back_to <= every and source == "memory" if every else back_to == 0
    close = all(abs(one - other) <= apart * abs(other) for one, other in zip(losses, whole, strict=True))
    return check(f"a node is lost of {hosts}, {fields}: {text}", as_far and close and not more, "\n".join(said))


RELAID = """
import json, sys
import raypar as rp

run = rp.recipe("gpt-tiny", mesh=rp.Mesh(pp=2), steps=10, microbatches=4, timeout=20.0)
others = [
    {"mesh": rp.Mesh(tp=2)},
    {"mesh": rp.Mesh(dp=2), "zero": 3},
    {"mesh": rp.Mesh(pp=2, dp=2) if sys.argv[2] == "4" else rp.Mesh(pp=2), "zero": None},
    {"mesh": rp.Mesh()},
]
with rp.launch(run) as job:
    losses, moved = [report.loss for report in job.train(2)], []
    for other in others if sys.argv[1] == "relaid" else []:
        moved.append(job.relayout(**other))
        losses += [report.loss for report in job.train(2)]
    losses += [report.loss for report in job.train()]
    print(json.dumps([losses, [[one.sent, one.least, str(one)] for one in moved]]))
"""


def is_relaid(cpus: int) -> bool:
    """Take a run through layouts over two hosts with so many actors each, and return whether its losses are those of
    the run that stays."""
    with cluster_of_hosts("first", "second", cpus=(cpus, cpus)) as cluster:
        said = [cluster.drive("-c", RELAID, what, str(2 * cpus), timeout=250) for what in ("stays", "relaid")]
    answers = [next(line for line in one.splitlines() if line.startswith("[[")) for one in said]
    (whole, _), (losses, moved) = map(json.loads, answers)
    for sent, least, told in moved:
        print(f"    {told}; {sent / max(least, 1):.3f} of the least")
    apart = max(abs(one - other) / abs(other) for one, other in zip(losses, whole, strict=True))
    holds = apart < 1e-5 and len(moved) == 4
    return check(f"relayouts over two hosts of {cpus}, losses {apart:.1e} apart", holds, "\n".join(said))


def main() -> int:
    """Do all of it."""
    words = argparse.ArgumentParser()
    words.add_argument("--recipe", default="gpt-small")
    words.add_argument("--steps", type=int, default=4)
    words.add_argument("--rate", default="100mbit")
    args = words.parse_args()
    if lacks := missing():
        print(f"skipped: {lacks}")
        return 0
    results = []
    with cluster_of_hosts("first", "second", cpus=(1, 1)) as cluster:
        alone = {layout: train(cluster, layout, args.recipe, args.steps, host=1, alone=True) for layout in LAYOUTS}
        for layout in LAYOUTS:
            across = train(cluster, layout, args.recipe, args.steps)
            results.append(check(f"{layout}=2 across hosts, bit by bit: {across}", across == alone[layout]))
        cluster.network.limit(args.rate)
        for layout in LAYOUTS:
            begin = time.monotonic()
            across = train(cluster, layout, args.recipe, args.steps)
            same = across == alone[layout]
            results.append(check(f"{layout}=2 at {args.rate}, in {time.monotonic() - begin:.0f} s", same))
        doctor = ["-m", "raypar.cli.main", "doctor"]
        try:
            said = cluster.drive(*doctor, timeout=300)
        except AssertionError as error:  # the head demands no token, which is a danger
            said = str(error)
        print("\n".join(f"    {line}" for line in said.splitlines() if " times " in line))
        slow = any(line.startswith("slow") and "between" in line for line in said.splitlines())
        results.append(check(f"doctor finds {args.rate} slow", slow, said))
        results.append(is_cut_told(cluster, args.recipe))
    results += [is_relaid(cpus) for cpus in (1, 2)]
    results.append(is_symmetric(args.recipe))
    results.append(is_host_replaced(args.recipe, 50 * args.steps))
    results += [is_loss_survived(*one) for one in LOSSES]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
