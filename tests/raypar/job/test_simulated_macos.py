"""A run on macOS, simulated for raypar's own code in driver and actors (tests/support/simulated_macos)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import QUIET
from tests.support.linux_only import linux_only_names

ROOT = Path(__file__).parents[3]
HOOK = ROOT / "tests/support/simulated_macos"
RUN = """
import os, signal, sys, threading, time
from dataclasses import replace

def main(folder):
    import raypar as rp
    from raypar.actors.machine.system_features import has_feature

    base = rp.recipe("gpt-tiny", mesh=rp.Mesh(pp=2), steps=3, timeout=60.0)
    with rp.launch(base) as job:
        told = {"simulated": not has_feature("memory_files"), "pp": rp.verify(base, job).ok}
        path = job.save(folder)
        job.reset(replace(base, steps=5), resume=path)
        reports = job.train()
        told |= {"next": 5 - len(reports), "peaks": [peak for one in reports for peak in one.peak_memory]}
        sharded = replace(base, mesh=rp.Mesh(dp=2), zero=3, offload="optimizer", offload_folder=folder)
        told["zero"] = rp.verify(sharded, job).ok
        job.reset(base)
        job.step()
        dies = job.who()[0].pid
        threading.Timer(0.2, os.kill, (dies, signal.SIGKILL)).start()
        begin = time.monotonic()
        try:
            job.train(10_000)
        except rp.JobError as error:
            told |= {"died": str(error).splitlines()[0], "seconds": time.monotonic() - begin - 0.2}
    return told

if __name__ == "__main__":
    import json
    print("told", json.dumps(main(sys.argv[1])))
"""


def on_macos(*argv, **others):
    """Run a command on the simulated macOS, and return what it printed."""
    path = os.pathsep.join(map(str, (HOOK, ROOT)))
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    env |= {**QUIET, "PYTHONPATH": path, "LINUX_ONLY": json.dumps(linux_only_names()), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *map(str, argv)],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **{"timeout": 240, **others},
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="this is another system")
def test_a_run_trains_is_verified_saved_and_resumed_and_its_end_is_noticed(tmp_path):
    (tmp_path / "run.py").write_text(RUN)
    code, said = on_macos(tmp_path / "run.py", tmp_path / "saved")
    assert code == 0, said
    told = json.loads(said.rpartition("told ")[2])
    assert told["simulated"]
    assert told["pp"]
    assert told["zero"]
    assert told["next"] == 3
    assert all(64 << 20 < peak < 4 << 30 for peak in told["peaks"])  # bytes that were taken for KiB would be far off
    assert told["died"].startswith("actor pp=0 died")
    assert told["seconds"] < 30.0  # and not the deadline of a wait


@pytest.mark.skipif(sys.platform != "linux", reason="this is another system")
def test_a_run_that_could_not_recover_is_refused_before_its_launch():
    code, said = on_macos("-m", "raypar.cli.main", "train", "gpt-tiny", "--max-failures", "2", "--mesh.pp", "0")
    assert code == 2
    assert (
        "--max-failures is 2, but recovery needs os.memfd_create, os.posix_fallocate, /proc/self/fd, os.pidfd_open"
        in said
    )
    assert "set max_failures to 0 and give save_every" in said
    assert "mesh.pp" in said  # with all other faults
