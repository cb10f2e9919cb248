"""Ray nodes in containers that share a host's network: a pid of one means another process in the other."""

from __future__ import annotations

import json

import pytest

from tests.support.clusters import cluster_of_hosts
from tests.support.hosts import missing
from tests.support.kernel import TELLS_EXITS

# The driver has a container without CPUs, and both actors are in the other one. When they have started, it starts
# processes of its own that have their pids. After the first recovery it knows the second actor, which then dies too.
DRIVER = """
import json, subprocess, time
from dataclasses import asdict
from pathlib import Path
import raypar as rp
from raypar.cluster.deaths import process_monitors as witnesses

witnesses._ANSWER = 20.0  # of a busy machine

def process_with(pid):
    for _ in range(50):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        made = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if made.pid == pid:
            return made
        made.kill()

run = rp.recipe("gpt-tiny", steps=4, mesh=rp.Mesh(dp=2), max_failures=2)
kills = [rp.chaos.kill("dp=0", at="STEP", step=2), rp.chaos.kill("dp=1", at="STEP", step=3)]
with rp.launch(run, chaos=kills) as job:
    pids = [one.pid for one in job.who()]
    innocent = [process_with(pid) for pid in pids]
    reports = job.train()
    deaths = [asdict(failure.death) for failure in job.failures]
    restored = [failure.source for failure in job.failures]
ended = [one.poll() for one in innocent]
for one in innocent:
    one.kill()
print(json.dumps({"pids": pids, "ended": ended, "steps": len(reports), "deaths": deaths, "restored": restored}))
"""


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_recovery_of_a_killed_actor_kills_nobody_who_has_its_pid_in_the_drivers_container():
    with cluster_of_hosts("driver", "actors", cpus=(0, 3), first_pids=(300, 20_000)) as cluster:
        found = json.loads(cluster.drive("-c", DRIVER, timeout=240).splitlines()[-1])
    assert min(found["pids"]) > 20_000 and len(found["pids"]) == 2
    assert found["ended"] == [None, None], "innocent processes with the actors' pids"
    assert found["steps"] == 4 and found["restored"] == ["memory", "memory"]
    if TELLS_EXITS:
        assert [death["signal"] for death in found["deaths"]] == ["SIGKILL"] * 2, "the other container was asked"
