"""Train gpt-small across two hosts: the losses of one host, a link that is limited, and one that is cut.

    python -m tests.long.two_hosts [--steps 4] [--rate 100mbit]

The losses of pp=2, dp=2 and tp=2 across hosts must be those of one host to the last bit, and the same with the link
limited; where the link is cut in a run, it must end within the deadline with a reason that names an actor. ``raypar
doctor`` must find the limited link slow. Exit code 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from tests.support.clusters import ENV, HostCluster, cluster_of_hosts
from tests.support.hosts import missing

LAYOUTS = ("pp", "dp", "tp")
DEADLINE = 30.0  # seconds: the timeout of the run whose link is cut


def train(cluster: HostCluster, layout: str, steps: int, *, host: int = 0, alone: bool = False) -> list[float]:
    """Train and return the losses.

    Args:
        cluster: The cluster.
        layout: The axis that is 2.
        steps: Number of steps.
        host: The host of the driver.
        alone: Whether to train on a Ray of the driver's own.
    """
    shape = [word for axis in LAYOUTS for word in (f"--mesh.{axis}", "2" if axis == layout else "1")]
    words = ["-m", "raypar.cli.main", "train", "gpt-small", *shape, "--steps", str(steps), "--log", "/tmp/log"]
    env = {**ENV} if alone else cluster.driver_env
    chosen = cluster.network.hosts[host]
    chosen.run(sys.executable, *words, env=env, timeout=400)
    lines = map(json.loads, chosen.run("cat", "/tmp/log").splitlines())
    return [line["loss"] for line in lines if "grad_norm" in line]


def check(what: str, holds: bool, told: str = "") -> bool:
    print(f"{'ok' if holds else 'FAILED'}: {what}{'' if holds else chr(10) + told}", flush=True)
    return holds


def is_cut_told(cluster: HostCluster) -> bool:
    """Cut the link in a run, and return whether it ended in time with a reason."""
    words = ["train", "gpt-small", "--mesh.pp", "2", "--steps", "100000", "--timeout", str(DEADLINE)]
    command = [sys.executable, "-u", "-m", "raypar.cli.main", *words]
    run = cluster.head.start(*command, env=cluster.driver_env)
    said = []
    assert run.stdout is not None
    for line in run.stdout:
        said.append(line)
        if "step 2/" in line:
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


def main() -> int:
    """Do all of it."""
    words = argparse.ArgumentParser()
    words.add_argument("--steps", type=int, default=4)
    words.add_argument("--rate", default="100mbit")
    args = words.parse_args()
    if lacks := missing():
        print(f"skipped: {lacks}")
        return 0
    results = []
    with cluster_of_hosts("first", "second", cpus=(1, 1)) as cluster:
        alone = {layout: train(cluster, layout, args.steps, host=1, alone=True) for layout in LAYOUTS}
        for layout in LAYOUTS:
            across = train(cluster, layout, args.steps)
            results.append(check(f"{layout}=2 across hosts, bit by bit: {across}", across == alone[layout]))
        cluster.network.limit(args.rate)
        for layout in LAYOUTS:
            begin = time.monotonic()
            across = train(cluster, layout, args.steps)
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
        results.append(is_cut_told(cluster))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
