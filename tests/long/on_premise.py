"""``ray up`` with examples/cluster/on_premise.yaml between hosts with sshd: train, submit jobs, and ``ray down``.

    python -m tests.long.on_premise [--recipe gpt-small]

Three hosts of namespaces: a desk, from which the launcher works over ssh, and two machines. What must hold: a run
trains across both machines, whose losses are those of one host; a job is submitted with the token, and refused without;
another Ray of the first machine outlives ``ray down``, the cluster can be started again at once, and in the end nothing
else is left. Exit code 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import yaml

from tests.support.clusters import RAY, ROOT
from tests.support.hosts import Host, hosts_on_a_network, missing

HOME = "/tmp/home"  # each host has a /tmp of its own
FILE = "/tmp/home/on_premise.yaml"
SSHD = """
Port 22
ListenAddress {address}
HostKey /tmp/ssh/host
AuthorizedKeysFile /tmp/ssh/authorized
PidFile /tmp/ssh/pid
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
SetEnv PYTHONPATH={root} PYTHONDONTWRITEBYTECODE=1
"""
ENV = {"HOME": HOME, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}


def make_home(host: Host) -> None:
    """Give a host a home folder with what is installed already, so that nothing comes from the network."""
    venv = Path(sys.executable).parents[1]
    stamp = f"cp {ROOT}/pyproject.toml {HOME}/raypar-cluster/installed"
    host.run("sh", "-c", f"mkdir -p {HOME}/raypar-cluster && ln -s {venv} {HOME}/raypar-cluster/venv && {stamp}")
    users = f"sed 's#^root:\\(.*\\):[^:]*:\\([^:]*\\)$#root:\\1:{HOME}:\\2#' /etc/passwd > /tmp/passwd"
    host.run("sh", "-c", f"{users} && mount --bind /tmp/passwd /etc/passwd")


def open_door(host: Host, public: str) -> None:
    """Start sshd on a host, for one key."""
    host.run("sh", "-c", "mkdir -p /tmp/ssh /run/sshd && ssh-keygen -q -t ed25519 -N '' -f /tmp/ssh/host")
    config = SSHD.format(address=host.address, root=ROOT)
    host.run(
        "sh",
        "-c",
        "printf '%s' \"$KEY\" > /tmp/ssh/authorized; printf '%s' \"$CONFIG\" > /tmp/ssh/config",
        env={"KEY": public, "CONFIG": config},
    )
    host.run("/usr/sbin/sshd", "-f", "/tmp/ssh/config")


def config_of(head: Host, workers: list[Host]) -> str:
    """Return the example with these hosts' addresses and key, and the file mounts found from any folder."""
    config = yaml.safe_load((ROOT / "examples" / "cluster" / "on_premise.yaml").read_text())
    config["provider"] |= {"head_ip": head.address, "worker_ips": [worker.address for worker in workers]}
    config["auth"] |= {"ssh_user": "root", "ssh_private_key": f"{HOME}/key"}
    config["head_setup_commands"] = [
        command.replace("10.0.0.1", head.address) for command in config["head_setup_commands"]
    ]
    for remote, local in config["file_mounts"].items():
        config["file_mounts"][remote] = local if local.startswith("~") else str(ROOT / local)
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):  # so that no layout fits on one machine
        config[key] = [command.replace("ray start", "ray start --num-cpus=1") for command in config[key]]
    return yaml.safe_dump(config)


LAYERS = """
import torch
from torch import nn

def layers():
    return [nn.Linear(4, 4), nn.Linear(4, 4)]

def batch(step, microbatch, dp):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + 10 * microbatch + dp))
    return x, x.sin()
"""
DRIVER = """
import my_layers
import raypar as rp
from torch import nn

run = rp.Run(model=rp.Layers(my_layers.layers, loss=nn.functional.mse_loss), data=rp.Batches(my_layers.batch),
             mesh=rp.Mesh(pp=2), microbatches=2, steps=3)
with rp.launch(run) as job:
    job.train()
    print("trained", job.num_actors, "actors")
"""

NODES = 'import ray; ray.init("auto", log_to_driver=False); print(sum(node["Alive"] for node in ray.nodes()), "alive")'


def trained(host: Host, run: str, words: str, env: dict[str, str]) -> list[float]:
    """Train on a Ray of the host's own, and return the losses."""
    host.run(
        sys.executable, "-m", "raypar.cli.main", "train", *words.split(), "--log", f"/tmp/{run}", env=env, timeout=300
    )
    return losses(host.run("cat", f"/tmp/{run}"))


def losses(log: str) -> list[float]:
    """Return the losses of a log, to the last bit."""
    return [line["loss"] for line in map(json.loads, log.splitlines()) if "grad_norm" in line]


def check(what: str, holds: bool, told: str = "") -> bool:
    print(f"{'ok' if holds else 'FAILED'}: {what}{'' if holds else chr(10) + told}", flush=True)
    return holds


def main() -> int:
    """Do all of it."""
    words = argparse.ArgumentParser()
    words.add_argument("--recipe", default="gpt-small")
    words.add_argument("--steps", default="4")
    args = words.parse_args()
    if lacks := missing("sshd", "ssh", "rsync"):
        print(f"skipped: {lacks}")
        return 0
    results = []
    with hosts_on_a_network("desk", "first", "second") as network:
        desk, first, second = network.hosts
        for host in network.hosts:
            make_home(host)
        desk.run("sh", "-c", f"ssh-keygen -q -t ed25519 -N '' -f {HOME}/key")
        public = desk.run("cat", f"{HOME}/key.pub")
        for host in (first, second):
            open_door(host, public)
        desk.run("sh", "-c", f"printf '%s' \"$CONFIG\" > {FILE}", env={"CONFIG": config_of(first, [second])})
        desk.run(RAY, "get-auth-token", "--generate", env=ENV)
        other_env = ENV | {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": "/tmp/other"}
        first.run(
            RAY,
            "start",
            "--head",
            "--port=7777",
            "--num-cpus=1",
            "--include-dashboard=false",
            "--node-ip-address=127.0.0.1",
            env=other_env,
        )  # another Ray of that machine
        others = first.run("pgrep", "-f", "gcs_server|raylet").split()
        results.append(bring_up(desk))

        def on_head(command: str, timeout: float = 300.0) -> str:
            return desk.run(RAY, "exec", FILE, command, env=ENV, timeout=timeout)

        results.append(check("another Ray goes on beside it", alive(first, others)))
        alone = {key: value for key, value in ENV.items() if key != "RAY_ADDRESS"} | {"RAY_AUTH_MODE": "disabled"}
        for layout in ("pp", "dp", "tp"):
            shape = " ".join(f"--mesh.{axis} {2 if axis == layout else 1}" for axis in ("pp", "dp", "tp"))
            words = f"{args.recipe} {shape} --steps {args.steps}"
            here = trained(desk, layout, words, alone)
            said = on_head(f"raypar train {words} --log /tmp/{layout} --wait-for-nodes 60")
            there = losses(first.run("cat", f"/tmp/{layout}"))
            where = "on 2 nodes" in said
            results.append(check(f"{layout}=2 across machines, bit by bit: {there}", where and there == here, said))
        results += submitted(desk, first, args)
        token = desk.run("cat", f"{HOME}/.ray/auth_token").strip()
        results.append(check("the head tells its token", token in on_head("ray get-auth-token")))
        on_head("mkdir -p /tmp/runs/first && echo here > /tmp/runs/first/metrics.jsonl")
        desk.run(RAY, "rsync-down", FILE, "/tmp/runs/first/", "/tmp/first/", env=ENV)
        desk.run("grep", "here", "/tmp/first/metrics.jsonl")
        logs = f"{HOME}/raypar-cluster/tmp/session_latest/logs"
        first.run("ls", f"{logs}/monitor.log", f"{logs}/monitor.out")
        second.run("ls", f"{logs}/raylet.out")
        results.append(is_machine_awaited(desk, second, args.recipe))
        desk.run(RAY, "down", "--yes", FILE, env=ENV, timeout=200)
        results.append(bring_up(desk))
        said = on_head(f"raypar train {args.recipe} --mesh.pp 2 --steps 2 --wait-for-nodes 120 2>&1 | cat")
        again = "on 2 nodes" in said and "step 2/2" in said
        results.append(check("ray up right after ray down, and a run across both machines", again, said))
        begin = time.monotonic()
        desk.run(RAY, "down", "--yes", FILE, env=ENV, timeout=200)
        results.append(check("another Ray outlives ray down", alive(first, others)))
        left = ""
        while time.monotonic() - begin < 90:
            left = "".join(of_cluster(host) for host in (first, second))
            if not left:
                break
            time.sleep(1)
        results.append(check(f"nothing is left {time.monotonic() - begin:.0f} s after ray down", not left, left))
    return 0 if all(results) else 1


def bring_up(desk: Host) -> bool:
    """Start the cluster from the desk, and return whether both machines join it in time."""
    begin = time.monotonic()
    desk.run(RAY, "up", "--yes", "--no-config-cache", FILE, env=ENV, timeout=300)
    print(f"ray up took {time.monotonic() - begin:.0f} s")
    said = ""
    while "2 alive" not in said and time.monotonic() - begin < 150:
        said = desk.run(RAY, "exec", FILE, f"python -c '{NODES}'", env=ENV, timeout=100)
    return check(f"both machines are up after {time.monotonic() - begin:.0f} s", "2 alive" in said, said)


def is_machine_awaited(desk: Host, lost: Host, recipe: str) -> bool:
    """Kill Ray on a machine in a run, and return whether the run goes on there, where the launcher starts it again."""
    train = (
        f"raypar train {recipe} --mesh.pp 2 --steps 40 --max-failures 2 --wait-for-nodes 240 2>&1 | cat"  # no terminal
    )
    run, said, lives = desk.start(RAY, "exec", FILE, train, env=ENV), list[str](), True
    assert run.stdout is not None
    for line in run.stdout:
        said.append(line)
        if lives and "step " in line and "loss" in line:
            lost.run("pkill", "-9", "-x", "raylet")
            lives = False
    told = "".join(said)
    waits = "the run waits up to 240 s in all for room for pp=" in told
    goes_on = [line for line in said if "the run goes on " in line]
    what = f"a machine that loses its Ray is awaited: {' '.join(goes_on).strip()}"
    return check(what, waits and len(goes_on) == 1 and "step 40/40" in told, told)


def submitted(desk: Host, first: Host, args: argparse.Namespace) -> list[bool]:
    """Submit jobs from the desk, through a tunnel as ``ray dashboard`` makes it, with and without the token."""
    options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "ExitOnForwardFailure=yes"]
    tunnel = desk.start(
        "ssh", "-N", "-i", f"{HOME}/key", *options, "-L", "8265:127.0.0.1:8265", f"root@{first.address}"
    )
    code = {"LAYERS": LAYERS, "DRIVER": DRIVER}
    write = 'printf "%s" "$LAYERS" > /tmp/work/my_layers.py; printf "%s" "$DRIVER" > /tmp/work/driver.py'
    desk.run("sh", "-c", f"mkdir /tmp/work; {write}", env=code)
    time.sleep(1)
    submit = [RAY, "job", "submit", "--address", "http://127.0.0.1:8265", "--working-dir", "/tmp/work", "--"]
    train = f"raypar train {args.recipe} --mesh.pp 2 --steps 2".split()

    def said(env: dict[str, str], *words: str) -> str:
        try:
            return desk.run(*submit, *words, env=env, timeout=200)
        except AssertionError as error:
            return f"REFUSED {error}"

    with_token, without = said(ENV, *train), said(ENV | {"RAY_AUTH_MODE": "disabled"}, *train)
    own = said(ENV, "python", "driver.py")
    refused = without.startswith("REFUSED")
    tunnel.kill()
    tunnel.wait()
    return [
        check("a job is submitted with the token", "succeeded" in with_token and "step 2/2" in with_token, with_token),
        check(
            "a job without the token is refused",
            refused and "Missing authentication token" in without,
            without,
        ),
        check("code of the desk's disk reaches the actors", "trained 2 actors" in own and "succeeded" in own, own),
    ]


def of_cluster(host: Host) -> str:
    """Return the processes of the cluster that are left on a host."""
    return host.run("sh", "-c", f"ps -e -o pid=,args= | grep '{HOME}/raypar-cluster/tm[p]' || true")


def alive(host: Host, processes: list[str]) -> bool:
    """Return whether all of a host's processes are there."""
    return set(processes) <= set(host.run("ps", "-e", "-o", "pid=").split())


if __name__ == "__main__":
    sys.exit(main())
