"""Training across two hosts: losses are those of one host, tensor groups may be split, what has no room is told.

The hosts are Linux namespaces with addresses of their own; tests/long/two_hosts.py has the long form.
"""

from __future__ import annotations

import json

import pytest

import raypar as rp
from tests.support.clusters import cluster_of_hosts
from tests.support.hosts import missing
from tests.support.kernel import TELLS_EXITS

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.timeout(300), pytest.mark.long]

LAYOUTS = ({"tp": 2}, {"pp": 2}, {"dp": 2})  # the first one is launched, the others take its actors
DRIVER = """
import contextlib, io, json, logging
from dataclasses import asdict
import ray
import raypar as rp
from raypar.cli.main import run_command as main
from raypar.cluster.deaths import process_monitors as witnesses

witnesses._ANSWER = 20.0  # of a busy machine
warned = []
class Kept(logging.Handler):
    def emit(self, record): warned.append(record.getMessage())
logging.getLogger("raypar").addHandler(Kept(logging.WARNING))

def printed(*words):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main(list(words))
    return code, said.getvalue()

losses, deaths, job = [], [], None
for layout in LAYOUTS:
    run = rp.recipe("gpt-tiny", steps=3, mesh=rp.Mesh(**layout), max_failures=0 if losses else 1)
    kill = [rp.chaos.kill("tp=1", at="STEP", step=2)]
    job = rp.launch(run, chaos=kill) if job is None else job.reset(run) or job
    losses.append([report.loss for report in job.train()])
    deaths = [asdict(failure.death) for failure in job.failures] or deaths
job.close()
ray.init(address="auto", namespace="raypar", log_to_driver=False, logging_level="ERROR")
full, unseen = [], []
try:
    rp.launch(rp.recipe("gpt-tiny", mesh=rp.Mesh(dp=3)))
except rp.ConfigError as error:
    full = error.faults
plans = printed("plan", "gpt-tiny", "--mesh.pp", "1", "--mesh.tp", "2"), printed("plan", "gpt-tiny", "--mesh.pp", "4")
code, found = printed("doctor", "--json", "--no-times")
try:
    rp.launch(rp.recipe("gpt-tiny", mesh=rp.Mesh(dp=2), folder="/tmp/run"))  # each host has a /tmp of its own
except rp.ConfigError as error:
    unseen = error.faults
losses = {"deaths": deaths, "losses": losses}
told = losses | {"warned": warned, "full": full, "unseen": unseen, "plans": [text for _, text in plans]}
print(json.dumps(told | {"code": code, "doctor": json.loads(found)}))
"""


@pytest.fixture(scope="module")
def found():
    with cluster_of_hosts("first", "second", cpus=(1, 1)) as cluster:
        return json.loads(cluster.drive("-c", f"LAYOUTS = {LAYOUTS!r}\n{DRIVER}").splitlines()[-1])


def test_losses_are_those_of_one_host_bit_by_bit(found, job_of):
    """Of two summands each, so the order of additions is the same everywhere."""
    for layout, across in zip(LAYOUTS, found["losses"], strict=True):
        job = job_of(rp.recipe("gpt-tiny", steps=3, mesh=rp.Mesh(**layout)))
        assert [report.loss for report in job.train()] == across, layout


@pytest.mark.skipif(not TELLS_EXITS, reason="this kernel does not tell how a process ended")
def test_how_an_actor_on_another_host_has_ended_is_told(found):
    """It was killed in its second step, and the run went on with the same bits."""
    (death,) = found["deaths"]
    assert (death["signal"], death["last_action"]) == ("SIGKILL", "STEP of step 2")
    assert death["cause"] == "ended by SIGKILL"


def test_a_tensor_group_that_no_node_has_room_for_is_split_with_one_warning(found):
    (warning,) = [text for text in found["warned"] if "tensor group" in text]
    assert "the tensor group of pp=0 lies on first (10.77.0.1) and second (10.77.0.2)" in warning


def test_plan_says_which_actor_goes_on_which_node_and_why_one_cannot(found):
    tensor, four = (plan.partition("on the cluster at 10.77.0.1:6379:\n")[2] for plan in found["plans"])
    first, second, split = tensor.splitlines()[:3]
    assert (first, second) == ("  first (10.77.0.1): pp=0 tp=0", "  second (10.77.0.2): pp=0 tp=1")
    assert "the tensor group of pp=0 lies on first" in split
    assert "mesh: 4 actors need 4 CPUs" in four and "second (10.77.0.2) has 1 CPU (1 free): room for 1" in four


def test_the_doctor_examines_every_node_and_finds_the_head_open(found):
    by = {(one["subject"], one["text"].partition(" uses")[0]): one for one in found["doctor"]}
    its = by["network", "second (10.77.0.2)"]
    assert its["level"] == "ok" and "uses eth0 (lo 127.0.0.1, " in its["text"]
    assert "eth0 10.77.0.2" in its["text"] and "astray0 192.168.9.1" in its["text"]
    dangers = [one["text"] for one in found["doctor"] if one["level"] == "danger" and "head" in one["text"]]
    assert dangers == ["anyone who reaches the head 10.77.0.1:6379 can run code there, without a token"]
    assert found["code"] == 1
    assert sum(one["subject"] == "versions" and one["level"] == "ok" for one in found["doctor"]) == 2


def test_a_folder_that_a_node_does_not_see_is_refused(found):
    assert found["unseen"] == [
        "node second (10.77.0.2) does not see the folder '/tmp/run': give one that all nodes share, such as one on NFS"
    ]


def test_a_world_that_has_no_room_is_told_node_by_node(found):
    (fault,) = found["full"]
    assert fault.startswith("mesh: 3 actors need 3 CPUs, the cluster has 2 (2 free) on 2 nodes (")
    assert "first (10.77.0.1) has 1 CPU (1 free): room for 1, second (10.77.0.2) has 1 CPU" in fault
