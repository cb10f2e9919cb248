"""A run beside others on real Ray nodes: what is refused, what works, and what each of them sees.

    python -m tests.long.neighbours [CASE ...]

The nodes are processes of this machine, of a Ray of its own for each case: a node that can't import raypar, with and
without a runtime environment that brings it; Ray's memory monitor; a head without CPUs, RAY_ADDRESS=auto, two
namespaces, and Ray's own commands while a run is under way. Exit code 1 if anything is not so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.clusters import RAY
from tests.support.process_tree import command_line, every_process

ROOT = Path(__file__).parents[2]
PORT, DASHBOARD = 26679, 28465
# A node's Python with this on its path finds no raypar, though it is installed, unless a runtime environment brings it.
HIDING = """
import os, sys
def is_brought(path):
    return "runtime_resources" in path or not os.path.isdir(os.path.join(path, "raypar"))
sys.path[:] = [path for path in sys.path if is_brought(path)]
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in getattr(one, "__module__", str(one))]
"""
DRIVER = """
import json, sys, time
import ray, raypar as rp

words = json.loads(sys.argv[1])
if words.get("init") is not None:
    ray.init(words.pop("address"), log_to_driver=False, **words["init"])
model = rp.GPT(layers=2, hidden=16, heads=2, seq=8)
settings = {"steps": 3} | words.get("run", {})
run = rp.Run(model, mesh=rp.Mesh(pp=2), microbatches=2, timeout=60.0, **settings)
with rp.launch(run) as job:
    print("nodes", [row.node for row in job.who()], flush=True)
    print("losses", [report.loss for report in job.train(on=lambda report: time.sleep(words.get("pause", 0.0)))])
"""


class Nodes:
    """A Ray of several nodes, which are processes of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, f"127.0.0.1:{PORT}"
        self.env = {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        self.env = {name: its for name, its in os.environ.items() if name != "RAY_ADDRESS"} | self.env

    def start(self, cpus: int, *, head: bool = False, **env: str) -> None:
        """Start a node."""
        place = [f"--port={PORT}", "--head", f"--dashboard-port={DASHBOARD}", f"--temp-dir={self.folder}/ray"]
        words = place if head else [f"--address={self.address}"]
        sizes = [f"--num-cpus={cpus}", "--object-store-memory=80000000"]
        command = [RAY, "start", *words, *sizes]
        subprocess.run(command, env=self.env | env, check=True, stdout=subprocess.DEVNULL, timeout=180)

    def driver(self, address: str = "", **words: object) -> subprocess.Popen[str]:
        """Start a driver that trains."""
        env = self.env | ({} if "init" in words else {"RAY_ADDRESS": address or self.address})
        given = json.dumps({"address": self.address, **words})
        command, pipe = [sys.executable, "-c", DRIVER, given], subprocess.PIPE
        return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, cwd=self.folder)

    def told(self, address: str = "", **words: object) -> str:
        """Return what a driver has written."""
        return "".join(self.driver(address, **words).communicate(timeout=300))

    def ray(self, *words: str, address: str = f"http://127.0.0.1:{DASHBOARD}") -> str:
        """Return what a command of Ray's prints."""
        env = self.env | {"RAY_ADDRESS": address}
        done = subprocess.run([RAY, *words], env=env, capture_output=True, text=True, timeout=120, check=False)
        return done.stdout + done.stderr


@contextmanager
def nodes() -> Iterator[Nodes]:
    """Give a folder to a Ray, and end all of it with the context."""
    folder = Path(tempfile.mkdtemp(prefix="neighbours-", dir="/tmp"))
    try:
        yield Nodes(folder)
    finally:
        for pid in every_process():
            if pid != os.getpid() and str(folder) in command_line(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def check(what: str, told: str, *, holds: bool) -> bool:
    print(f"{'ok' if holds else 'FAILED'}: {what}{'' if holds else chr(10) + told}", flush=True)
    return holds


def code() -> bool:
    """Launch on a node that can't import raypar, and bring it there."""
    with nodes() as its:
        (its.folder / "hiding").mkdir()
        (its.folder / "hiding/sitecustomize.py").write_text(HIDING)
        its.start(1, head=True)
        its.start(1, PYTHONPATH=str(its.folder / "hiding"))
        told = its.told()
        oks = [check("a node without raypar is refused by name", told, holds="has no raypar, this process" in told)]
        oks[0] &= "ConfigError" in told and "ModuleNotFoundError" not in told
        brought = [str(ROOT / name) for name in ("raypar", "actors", "schedules")]
        told = its.told(init={"namespace": "raypar", "runtime_env": {"py_modules": brought}})
        oks.append(check("py_modules bring it", told, holds="losses [" in told))
        bad = {"namespace": "raypar", "runtime_env": {"pip": ["no-such-package-of-anybody"]}}
        told = its.told(init=bad)
        says = re.search(r"RuntimeEnvSetupError: Failed to set up runtime environment\. \S+", told)
        oks.append(check("what Ray says of an environment that fails is passed on", told, holds=says is not None))
    return all(oks)


def memory() -> bool:
    """Let Ray's memory monitor end an actor."""
    with nodes() as its:
        total, available = (_meminfo(name) for name in ("MemTotal", "MemAvailable"))
        threshold = f"{1 - available / total + 0.12:.3f}"
        env = {"RAY_memory_usage_threshold": threshold, "RAY_memory_monitor_refresh_ms": "250"}
        its.start(3, head=True, **env)
        folder = str(its.folder / "run")
        driver = its.driver(pause=0.05, run={"steps": 2000, "folder": folder, "save_every": 5})
        end = time.monotonic() + 120
        while not (its.folder / "run/checkpoints/step-00000005").exists() and time.monotonic() < end:
            time.sleep(0.2)
        hog = subprocess.Popen([sys.executable, "-c", f"x = b'1' * {int(0.14 * total)}; import time; time.sleep(60)"])
        told = "".join(driver.communicate(timeout=240))
        hog.kill()
    says = re.search(r"ended by Ray's memory monitor.* were used, above the \d\S* of RAY_memory_usage_threshold", told)
    oks = [check("its end is told with the threshold", told, holds=says is not None)]
    oks.append(check("and how the run goes on", told, holds="To go on, launch the run again with resume=" in told))
    return all(oks)


def commands() -> bool:
    """Look at runs with Ray's own commands, on a cluster whose head gives no CPU."""
    with nodes() as its:
        its.start(0, head=True)
        its.start(4)
        settings = {"steps": 400, "folder": str(its.folder / "a/first")}
        long = its.driver(pause=0.1, init={"namespace": "one"}, run=settings)
        assert long.stdout is not None
        long.stdout.readline()
        told = its.told("auto", run={"folder": str(its.folder / "b/first")})
        what = "RAY_ADDRESS=auto, a head without CPUs, a folder of the same name elsewhere"
        oks = [check(what, told, holds="losses [" in told)]
        ours = re.compile(r"raypar-\S*first-\w{8} pp=[01]")
        actors = its.ray("list", "actors", "--filter", "state=ALIVE")
        oks.append(check("ray list actors", actors, holds=len(ours.findall(actors)) == 2))
        groups = its.ray("list", "placement-groups", "--filter", "state=CREATED")
        oks.append(check("ray list placement-groups", groups, holds=len(ours.findall(groups)) == 2))
        actor = re.findall(r"\b[0-9a-f]{32}\b", actors)
        logs = its.ray("logs", "actor", "--id", actor[0], address=its.address) if actor else "Error: no actor"
        oks.append(check("ray logs actor", logs, holds="Error:" not in logs))
        script = "import ray; ray.init('auto', log_to_driver=False); print('events', len(ray.timeline()))"
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=its.env, capture_output=True, text=True, timeout=120, check=False)
        oks.append(check("ray.timeline()", done.stderr, holds=re.search(r"events [1-9]", done.stdout) is not None))
        long.send_signal(signal.SIGINT)
        long.communicate(timeout=120)
        saved = [*(its.folder / "a/first/checkpoints").glob("step-*")]
        oks.append(check("the other run was not disturbed, and saved at Ctrl-C", str(saved), holds=bool(saved)))
        groups = its.ray("list", "placement-groups", "--filter", "state=CREATED")
        oks.append(check("nothing is left", groups, holds="raypar-" not in groups))
    return all(oks)


def _meminfo(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


CASES: dict[str, Callable[[], bool]] = {"code": code, "memory": memory, "commands": commands}


def main() -> int:
    oks = [CASES[name]() for name in sys.argv[1:] or CASES]
    return not all(oks)


if __name__ == "__main__":
    sys.exit(main())
