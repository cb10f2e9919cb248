"""Every finding of the doctor: what makes it, and what it advises."""

from __future__ import annotations

import copy
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

from raypar.actors.machine.process_identity import own_identity, process_began
from raypar.cluster.nodes.nodes import package_version_faults, versions_collector
from raypar.cluster.placement.placement import Node
from raypar.cluster.ray_private import OWNER_FILE
from raypar.doctor import examination, exposure, group_times
from raypar.doctor import leftovers as left
from raypar.doctor.examination import cluster_findings
from raypar.doctor.exposure import exposure_findings, is_loopback
from raypar.doctor.finding import Finding, as_dicts, is_sound
from raypar.doctor.group_times import times_findings
from raypar.doctor.leftovers import leftover_findings, leftovers, sweep
from raypar.doctor.machines import facts_collector, machine_findings, token_findings

NODE = Node("id1", "n1", "10.0.0.1", {"CPU": 8.0}, {"CPU": 8.0})
FACTS = {
    "system": "linux",
    "interfaces": {"lo": {"address": "127.0.0.1", "mbits": -1}, "eth0": {"address": "10.0.0.1", "mbits": 10_000}},
    "gpus": [],
    "torch": "2.13.0+cpu",
    "shm": {"total": 8 << 30, "free": 7 << 30},
    "files": 65536,
    "token_file": "/home/me/.ray/auth_token",
    "token_mode": 0o600,
    "auth_mode": "token",
}
FAST = {"eth1": {"address": "10.1.0.1", "mbits": 100_000}}
L4 = ["GPU 0: NVIDIA L4 (UUID: GPU-1)", "GPU 1: NVIDIA L4 (UUID: GPU-2)"]


def node_with(**changes):
    return Node(**{**vars(NODE), **changes})


def found_on(facts, node=NODE, alone=False):
    return [(one.level, one.subject, str(one)) for one in machine_findings(node, {**FACTS, **facts}, alone=alone)]


def test_a_sound_node_has_nothing_but_facts():
    assert [level for level, _, _ in found_on({})] == ["ok"] * 4
    both = found_on({"gpus": L4, "torch": "2.13.0"}, node_with(total={"CPU": 8.0, "GPU": 2.0}))
    assert [level for level, _, _ in both] == ["ok"] * 4
    assert "ok     gpus      n1 (10.0.0.1): 2, the first GPU 0: NVIDIA L4" in [text for _, _, text in both]


@pytest.mark.parametrize(
    ("facts", "node", "level", "says"),
    [
        ({}, {"address": "127.0.0.1"}, "wrong", "has a loopback address in Ray, which no other node reaches"),
        ({}, {"address": "203.0.113.9"}, "wrong", "has no interface with its address in Ray (lo 127.0.0.1, eth0"),
        (
            {"interfaces": FACTS["interfaces"] | FAST},
            {},
            "slow",
            "uses eth0, and eth1 is faster (lo 127.0.0.1, eth0 10.0.0.1 at 10 Gbit/s, eth1 10.1.0.1 at 100 Gbit/s): "
            "start Ray there with --node-ip-address=10.1.0.1",
        ),
        ({"gpus": L4}, {}, "wrong", "has 2 GPUs, and its Ray says 0: start its Ray with --num-gpus=2"),
        ({}, {"total": {"GPU": 1.0}}, "wrong", "has 0 GPUs, and its Ray says 1"),
        ({"gpus": L4}, {"total": {"GPU": 2.0}}, "wrong", "its torch 2.13.0+cpu no CUDA: install PyPI's torch"),
        ({"shm": {"total": 64 << 20, "free": 64 << 20}}, {}, "slow", "0.1 GiB, 0.1 free: Ray puts its object store on"),
        ({"files": 1024}, {}, "note", "a process may open 1024 files: ulimit -n 65536 before ray start"),
        (
            {"token_mode": 0o644},
            {},
            "danger",
            "others may read the token in /home/me/.ray/auth_token (mode 0644): ",
        ),
        ({"token_mode": 0o660}, {}, "danger", "(mode 0660)"),
    ],
)
def test_what_is_wrong_with_a_node_is_told_with_advice(facts, node, level, says):
    wrong = [one for one in found_on(facts, node_with(**node)) if one[0] != "ok"]
    ((found, _, text),) = wrong
    assert (found, says in text) == (level, True), text


def test_a_ray_of_one_machine_may_be_on_its_loopback():
    assert {level for level, _, _ in found_on({}, node_with(address="127.0.0.1"), alone=True)} == {"ok"}
    (none,) = token_findings("here", {**FACTS, "token_mode": -1})
    assert none.level == "ok"


def test_this_machine_tells_its_facts(monkeypatch, tmp_path):
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o640)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    facts = facts_collector()()
    assert facts.keys() == FACTS.keys()
    assert facts["interfaces"]["lo"]["address"] == "127.0.0.1"
    assert facts["shm"]["total"] >= facts["shm"]["free"] > 0
    assert facts["token_mode"] == 0o640
    assert "secret" not in json.dumps(facts)


def test_versions_that_differ_are_told_with_the_node_and_what_to_install():
    own = {"python": "3.11", "raypar": "0.1.0", "torch": "2.13.0", "ray": "2.60.0"}
    assert package_version_faults(NODE, own, dict(own)) == []
    faults = package_version_faults(NODE, own, own | {"python": "3.12", "torch": "2.12.1", "raypar": ""})
    assert faults[0].startswith("node n1 (10.0.0.1) has python 3.12, this process 3.11: start its Ray with Python 3.11")
    assert "has no raypar, this process 0.1.0: pip install raypar==0.1.0 there, or take the node away" in faults[1]
    assert "has torch 2.12.1, this process 2.13.0: pip install torch==2.13.0" in faults[2]
    assert package_version_faults(NODE, own, own | {"raypar": "of no release"}) == [], "as py_modules bring it"
    (fault,) = package_version_faults(NODE, own | {"raypar": "of no release"}, own | {"raypar": ""})
    assert "has no raypar, this process of no release: let py_modules of a runtime_env bring it there, or" in fault
    assert package_version_faults(NODE, own, "no module") == ["node n1 (10.0.0.1) does not run a task: no module"]
    assert versions_collector()()["ray"]


# --- who may run code there -------------------------------------------------------------------------------------------


@pytest.fixture
def dashboard():
    """A dashboard on the loopback that answers with a status."""

    class Answer(http.server.BaseHTTPRequestHandler):
        status = 200

        def do_GET(self):
            self.send_response(self.status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield Answer, f"127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.parametrize(
    ("status", "loopback", "level", "says"),
    [
        (
            200,
            False,
            "danger",
            "takes jobs from anyone who reaches it, without a token: start the head ",
        ),
        (401, False, "note", "is open to the network, and demands the token: what it sends is not encrypted"),
        (200, True, "ok", "is reached from the head alone"),
    ],
)
def test_a_dashboard_that_is_open_to_the_network_is_a_danger(dashboard, monkeypatch, status, loopback, level, says):
    answer, address = dashboard
    answer.status = status
    monkeypatch.setattr(exposure, "is_loopback", lambda _: loopback)
    (found,) = exposure_findings("", address)
    assert (found.level, found.subject, says in str(found)) == (level, "dashboard", True), str(found)


def test_a_dashboard_that_does_not_answer_and_none(monkeypatch):
    monkeypatch.setattr(exposure, "answer_without_token", lambda _: None)
    assert [one.text for one in exposure_findings("", "10.0.0.9:8265")] == ["10.0.0.9:8265 does not answer from here"]
    assert [one.text for one in exposure_findings("", "")] == ["there is none"]


@pytest.mark.parametrize(
    ("head", "accepts", "level", "says"),
    [
        (
            "10.0.0.1:6379",
            True,
            "danger",
            "anyone who reaches the head 10.0.0.1:6379 can run code there, without a token",
        ),
        ("10.0.0.1:6379", False, "ok", "demands the token"),
        ("10.0.0.1:6379", None, "note", "does not say"),
        ("127.0.0.1:6379", True, "ok", "is reached from its machine alone"),
    ],
)
def test_a_head_without_a_token_is_a_danger(monkeypatch, head, accepts, level, says):
    monkeypatch.setattr(exposure, "accepts", lambda address, token: accepts)
    found = next(exposure_findings(head, ""))
    assert (found.level, found.subject, says in str(found)) == (level, "token", True), str(found)


@pytest.mark.parametrize("address", ["127.0.0.1:8265", "localhost:8265", "127.9.0.1:1", "[::1]:8265"])
def test_loopback_addresses(address):
    assert is_loopback(address)


def test_others_are_not():
    assert not any(map(is_loopback, ("10.0.0.1:8265", "0.0.0.0:8265", "head.example:8265")))


def test_the_cluster_is_told_a_lost_node_and_one_that_gives_no_cpu(monkeypatch):
    of_ray = [
        {"NodeManagerAddress": f"10.0.0.{last}", "NodeManagerHostname": f"n{last}", "Alive": alive}
        for last, alive in ((1, True), (1, False), (2, False))
    ]
    monkeypatch.setattr(ray, "nodes", lambda: of_ray)
    monkeypatch.setattr(examination, "exposure_findings", lambda head, dashboard: [])
    monkeypatch.setattr(examination, "dashboard_address", lambda: "")
    monkeypatch.setattr(examination, "head_address", lambda: "10.0.0.1:6379")
    where, lost, head = cluster_findings("10.0.0.1:6379", [node_with(total={}), NODE])
    assert where.text == "the cluster at 10.0.0.1:6379: 2 nodes, 8 CPUs, 0 GPUs"
    assert (lost.level, lost.text) == ("note", "n2 (10.0.0.2) is lost")
    assert (head.level, head.text) == ("note", "n1 (10.0.0.1) has no CPU to give: no actor lands there")


def test_a_ray_of_our_own_is_told_by_the_machine_and_not_by_its_slots(monkeypatch):
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(examination, "num_cores", lambda: 2)
    monkeypatch.setattr(examination, "total_memory", lambda: 8 << 30)
    (here,) = cluster_findings("", [node_with(total={"CPU": 16.0})])
    assert here.text.endswith(": 2 cores, 8.0 GiB of memory, 0 GPUs; at most 16 actors start here, and share them")


def test_a_mac_is_not_sick_for_what_it_lacks():
    facts = {"system": "darwin", "interfaces": {}, "shm": {"total": 0, "free": 0}}
    assert [level for level, _, _ in found_on(facts, node_with(address="127.0.0.1"), alone=True)] == ["ok"] * 4
    told = "".join(text for _, _, text in found_on(facts))
    assert "which interfaces it has is known on Linux alone, and this is darwin" in told
    assert "object store is in files, as darwin has no /dev/shm" in told
    assert [level for level, _, _ in found_on({**facts, "system": "linux"})].count("ok") == 2  # Linux has both


def test_leftovers_are_not_looked_for_where_processes_can_not_be_read(monkeypatch, tmp_path):
    folder = session(tmp_path, "alive", os.getpid(), 0)
    monkeypatch.setattr(left, "has_feature", lambda feature: False)
    assert leftovers(tmp_path) == []  # else a Ray in use would be taken for one that is over
    for (found,) in (leftover_findings([]), sweep([])):
        assert (found.level, found.subject) == ("ok", "leftovers")
        assert "not looked for" in found.text
    assert folder.exists()


# --- leftovers --------------------------------------------------------------------------------------------------------


def session(root, name, driver, began, where=None):
    folder = root / f"session_{name}"
    folder.mkdir(parents=True)
    (folder / OWNER_FILE).write_text(f"{driver} {began} {where or own_identity().pid_domain}")
    return folder


def test_leftovers_are_found_and_swept_and_nothing_else_is(tmp_path):
    root, gone = tmp_path / "ray", 2**22 + 5
    dead, alive = session(root, "dead", gone, 1), session(root, "alive", os.getpid(), process_began(os.getpid()))
    elsewhere = session(root, "elsewhere", gone, 1, where=own_identity()._replace(boot="another").pid_domain)
    longer = session(root, "dead-2", os.getpid(), process_began(os.getpid()))  # a name that begins with another's
    foreign = root / "session_foreign"
    foreign.mkdir()
    runs = [sys.executable, "-c", "import time; time.sleep(60)"]
    started = {
        folder: subprocess.Popen([*runs, f"--log={folder}/logs/x"])
        for folder in (dead, alive, elsewhere, longer, foreign)
    }
    try:
        end = time.monotonic() + 10
        while not (found := leftovers(root))[0].processes:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert [(one.folder, list(one.processes)) for one in found] == [(dead, [started[dead].pid])]
        (told,) = leftover_findings(found)
        assert (told.level, told.text) == ("wrong", "1 processes of 1 Rays whose driver is gone still run")
        assert "--sweep" in told.advice
        threading.Thread(target=started[dead].wait, daemon=True).start()  # as the first process would do
        (done,) = sweep(found)
        assert (done.level, done.text) == ("ok", "1 processes were ended, 1 folders removed")
        assert not dead.exists()
        assert all(one.poll() is None for folder, one in started.items() if folder != dead)
        assert all(folder.exists() for folder in started if folder != dead)
        assert [one.text for one in leftover_findings(leftovers(root))] == ["none"]
    finally:
        for one in started.values():
            one.kill()
            one.wait()


def test_a_session_whose_start_was_interrupted_is_found_by_its_drivers_number(tmp_path):
    """Ray names a session folder by time and number, and raypar notes the driver before Ray makes the folder."""
    gone = 2**22 + 5
    folders = [tmp_path / f"session_2026-11-30_22-40-00_000001_{number}" for number in (gone, 1)]
    for folder in folders:
        (folder / "logs").mkdir(parents=True)
    owner = tmp_path / f"{OWNER_FILE}-{gone}"
    owner.write_text(f"{gone} 1 {own_identity().pid_domain}")
    (found,) = leftovers(tmp_path)
    assert found.folder == folders[0]
    assert "1 folders removed" in next(iter(sweep([found]))).text
    assert list(tmp_path.iterdir()) == folders[1:]


def test_who_reads_the_logs_of_a_ray_that_is_over_is_not_ended(tmp_path):
    folder = session(tmp_path, "dead", 2**22 + 5, 1)
    (folder / "log").touch()
    with subprocess.Popen(["tail", "-f", folder / "log"]) as reader:
        try:
            while str(folder) not in Path(f"/proc/{reader.pid}/cmdline").read_text():
                time.sleep(0.01)  # until it has begun
            (found,) = leftovers(tmp_path)
            assert found.processes == {}
        finally:
            reader.kill()


def test_a_number_that_is_another_processs_now_is_no_driver(tmp_path):
    folder = session(tmp_path, "old", os.getpid(), process_began(os.getpid()) - 1)
    (found,) = leftovers(tmp_path)
    assert found.folder == folder
    (told,) = leftover_findings([found])
    assert told.level == "note" and f"1 session folders of Rays that are over, in {tmp_path}" in told.text


def test_folders_of_another_user_or_in_disorder_are_left_alone(tmp_path):
    folder = session(tmp_path, "broken", 1, 1)
    (folder / OWNER_FILE).write_text("no numbers")
    link = session(tmp_path, "link", 2**22 + 5, 1)
    (link / OWNER_FILE).rename(tmp_path / "elsewhere")
    (link / OWNER_FILE).symlink_to(tmp_path / "elsewhere")
    assert leftovers(tmp_path) == []
    assert leftovers(tmp_path / "nowhere") == []


# --- times ------------------------------------------------------------------------------------------------------------

MIB = 1 << 20


def test_a_slow_node_and_a_slow_network_are_named():
    fast, slow = {4096: 1e-4, 64 * MIB: 2e-2}, {4096: 1e-4, 64 * MIB: 6e-2}
    found = list(times_findings({"in a": fast, "in b": copy.copy(fast), "in c": slow}, inside=True))
    assert [one.level for one in found] == ["ok", "ok", "slow"]
    assert found[0].text == "all_reduce in a: 4 KiB 100 us, 64 MiB 20 ms"
    assert "all_reduce in c" in found[2].text and "64 MiB take 3.0 times as long as elsewhere" in found[2].text
    (link,) = times_findings({"between a and b": {64 * MIB: 0.7}}, inside=False)
    assert link.level == "slow" and "(0.10 GB/s): keep tp and cp inside nodes" in str(link)
    (node,) = times_findings({"in a": {64 * MIB: 0.7}}, inside=True)
    assert node.level == "slow" and "other processes use the node's cores" in node.advice


def test_what_is_sick_and_what_is_only_slow():
    kinds = {level: Finding(level, "ray", "x") for level in ("ok", "note", "slow", "wrong", "danger")}
    assert is_sound([kinds["ok"], kinds["note"], kinds["slow"]])
    assert not is_sound([kinds["ok"], kinds["wrong"]]) and not is_sound([kinds["danger"]])
    assert as_dicts([kinds["ok"]]) == [{"level": "ok", "subject": "ray", "text": "x", "advice": ""}]


# --- with a real Ray --------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr("raypar.cli.doctor.examined", lambda **its: examination.examined(**its, sizes=(4096, MIB)))
    monkeypatch.setattr("raypar.doctor.leftovers.ray_folder", lambda: tmp_path)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))


@pytest.mark.long
def test_a_cluster_is_examined_and_groups_are_timed(cluster, said, quick):
    code, out, err = said("doctor", "--json")
    found = json.loads(out)
    assert (code, err) == (0, ""), out
    by_subject = {one["subject"]: one for one in found}
    assert by_subject["ray"]["text"].endswith(", 0 GPUs; at most 16 actors start here, and share them")
    assert by_subject["times"]["text"].startswith("all_reduce in ") and "1 MiB" in by_subject["times"]["text"]
    assert {"leftovers", "versions", "network", "gpus", "memory", "token"} <= by_subject.keys()


def test_lines_a_count_and_the_exit_code(cluster, said, quick, tmp_path):
    (tmp_path / "none").write_text("secret")
    (tmp_path / "none").chmod(0o604)
    code, out, _ = said("doctor", "--no-times")
    lines = out.splitlines()
    assert code == 1
    assert lines[0] == "ok     leftovers none"
    assert lines[1].startswith(
        f"danger token     this machine: others may read the token in {tmp_path}/none (mode 0604)"
    )
    assert " wrong or dangerous, " in lines[-1] and not any("times" in line for line in lines[:-1])
    assert Path(tmp_path / "none").exists()


def test_a_ray_that_it_starts_itself_leaves_no_folder_and_its_token_file_is_no_finding(monkeypatch, quick, tmp_path):
    """Ray makes a token file when it starts."""
    earlier = session(tmp_path, "earlier", os.getpid(), process_began(os.getpid()))

    @contextmanager
    def started():
        made.append(session(tmp_path, "made", os.getpid(), process_began(os.getpid())))
        (tmp_path / "none").write_text("secret")
        (tmp_path / "none").chmod(0o600)
        yield [NODE]

    made = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(examination, "connected", started)
    monkeypatch.setattr(examination, "cluster_findings", lambda *_: [])
    told = {NODE.id: versions_collector()()}, {NODE.id: FACTS}
    monkeypatch.setattr(examination, "facts_of", lambda nodes, collector: told["facts" in collector.__qualname__])
    doing = list[str]()
    found = [*examination.examined(sweeps=False, times=False, doing=doing.append)]
    assert doing == ["starting Ray on this machine", "asking 1 node for versions, network, GPUs and memory"]
    assert [one.text for one in found if one.subject == "token"] == ["this machine has no token file"]
    assert any(one.subject == "network" for one in found)
    assert earlier.exists() and made and not made[0].exists()


def test_it_says_which_nodes_it_measures_next(monkeypatch):
    monkeypatch.setattr(group_times, "all_reduce_seconds", lambda nodes, sizes: dict.fromkeys(sizes, 1e-3))
    doing, other = list[str](), node_with(id="id2", name="n2", address="10.0.0.2")
    assert len([*group_times.group_time_findings([NODE, other], (4096, MIB), doing.append)]) == 3
    what = "timing an all_reduce of 4 KiB, 1 MiB"
    assert doing == [
        f"{what} in {NODE} (1 of 2 nodes)",
        f"{what} in {other} (2 of 2 nodes)",
        f"{what} between {NODE} and {other}",
    ]


def test_an_address_at_which_nothing_answers_is_a_finding(said, quick, monkeypatch):
    monkeypatch.setattr("raypar.cluster.lifecycle.ray_cluster.ray.is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    code, out, _ = said("doctor", "--no-times")
    assert code == 1
    assert "wrong  ray       RAY_ADDRESS is 'ray://10.0.0.1:10001', which is Ray Client" in out
