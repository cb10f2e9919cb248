"""What raypar takes of Ray's private names: it is there in this Ray, and one that is gone is told and done without."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray._private.ray_logging import LogDeduplicator

from raypar.cluster import address, ray_private


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What a start found: the address that Ray makes of 127.0.0.1, and the settings."""
    services = SimpleNamespace(resolve_ip_for_localhost=lambda host: "192.0.2.2")
    found = []

    def init(**settings):
        resolve = getattr(services, "resolve_ip_for_localhost", None)
        found.append((resolve and resolve(settings.pop("_node_ip_address")), settings))
        return SimpleNamespace(address_info={"session_dir": str(tmp_path)})

    fake = SimpleNamespace(init=init, _private=SimpleNamespace(services=services), _raylet=SimpleNamespace())
    monkeypatch.setattr(ray_private, "ray", fake)
    return SimpleNamespace(found=found, services=services, folder=tmp_path)


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "/tmp"),
        ({"TMPDIR": "/var/tmp"}, "/var/tmp"),
        ({"TMPDIR": "/var/tmp", "RAY_TMPDIR": "/dev/shm"}, "/dev/shm"),
        ({"TMPDIR": "/" + "scratch" * 6}, "/tmp"),  # a socket in a session's folder there has more than 103 bytes
        ({"RAY_TMPDIR": "/" + "\N{GREEK SMALL LETTER ALPHA}" * 20}, "/tmp"),
    ],
)
def test_the_folder_of_a_local_ray_leaves_room_for_the_paths_of_sockets(variables, folder, monkeypatch, caplog):
    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = ray_private.ray_folder()
    assert found == Path(folder) / f"raypar-{os.getuid()}" / "ray"
    assert stat.S_IMODE(found.parent.stat().st_mode) == 0o700
    wrong = [name for name, value in variables.items() if len(os.fsencode(value)) > 30]
    assert [record.getMessage().split()[0] for record in caplog.records] == wrong


def test_a_folder_that_is_not_this_user_s_alone_is_not_taken(tmp_path, monkeypatch):
    """Others may make one under the name of ours, or a link, or have opened it."""
    short = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    monkeypatch.setenv("RAY_TMPDIR", str(short))
    own = f"raypar-{os.getuid()}"
    (short / own).symlink_to(tmp_path)
    (short / f"{own}-1").write_text("")
    (short / f"{own}-2").mkdir(mode=0o777)
    (short / f"{own}-2").chmod(0o777)
    assert ray_private.ray_folder() == short / f"{own}-2" / "ray"
    assert stat.S_IMODE((short / f"{own}-2").stat().st_mode) == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (short / "raypar-12345").mkdir()
    with pytest.raises(FileExistsError, match="somebody else has made the folders"):
        ray_private.ray_folder()
    shutil.rmtree(short)


def test_this_ray_has_the_names():
    assert callable(ray_private.ray._private.services.resolve_ip_for_localhost)
    assert callable(ray_private.ray._raylet.AuthenticationTokenLoader.instance)
    assert callable(ray_private.ray._private.state.state.get_draining_nodes)


def test_without_its_names_it_is_not_known_whether_this_machine_is_a_node(started, caplog):
    assert ray_private.has_own_node("10.0.0.1:6379", 1.0) is None and "looks for one for a minute" in caplog.text


def test_nodes_that_ray_drains_are_told_with_their_deadlines(monkeypatch, caplog):
    state = SimpleNamespace(get_draining_nodes=lambda: {"a": 12500, "b": 0})
    monkeypatch.setattr(ray_private.ray._private.state, "state", state)
    assert ray_private.draining_nodes() == {"a": 12.5, "b": float("inf")}
    del state.get_draining_nodes
    assert ray_private.draining_nodes() == {} and "is noticed when it is gone" in caplog.text


DEATH = "(raylet) A worker died or was killed while executing a task by an unexpected system error."
NODES_DEATH = """Raylet is terminated. Termination is unexpected. Possible reasons include: (1) SIGKILL by the
user or system OOM killer. Last 20 lines of the Raylet logs:
    [state-dump]"""  # and what the head says of a node that no longer answers
SILENT_NODE = (
    "The node with node id: 1 and name: b has been marked dead because the detector has missed too many heartbeats"
)


def printed(deduplicator):
    """The lines that Ray prints of its texts for a dead actor, two dead nodes, and another one."""
    lines = [DEATH, NODES_DEATH, SILENT_NODE, "mine"]
    return [line for batch in deduplicator.deduplicate({"lines": lines, "pid": 1}) for line in batch["lines"]]


def test_what_ray_says_of_dead_actors_and_nodes_is_silenced_and_nothing_else(monkeypatch):
    mine = LogDeduplicator(5, None, None)
    assert printed(mine) == [DEATH, NODES_DEATH, SILENT_NODE, "mine"]
    monkeypatch.setattr(ray_private.ray._private.ray_logging, "stdout_deduplicator", mine)
    ray_private.silence_deaths()
    assert printed(mine) == ["mine"]


def test_what_the_user_lets_ray_skip_is_kept(monkeypatch):
    users = LogDeduplicator(5, None, "mine")
    monkeypatch.setattr(ray_private.ray._private.ray_logging, "stdout_deduplicator", users)
    ray_private.silence_deaths()
    assert printed(users) == [DEATH, NODES_DEATH, SILENT_NODE]


def test_a_variable_of_the_user_s_is_kept_in_a_fresh_process():
    program = (
        "import ray; from raypar.cluster import ray_private; ray_private.silence_deaths()\n"
        "print(ray._private.ray_logging.stdout_deduplicator.skip_re.pattern)"
    )
    told = os.environ | {"RAY_DEDUP_LOGS_SKIP_REGEX": "mine"}
    assert subprocess.check_output([sys.executable, "-c", program], env=told, text=True, timeout=60) == "mine\n"


def test_a_start_keeps_the_loopback_and_closes_the_session_folder(started, caplog):
    before = started.services.resolve_ip_for_localhost
    ray_private.start_on_loopback(num_cpus=2)
    assert started.found == [("127.0.0.1", {"num_cpus": 2, "_temp_dir": str(ray_private.ray_folder())})]
    assert started.services.resolve_ip_for_localhost is before, "only for the time of the start"
    assert not caplog.records


def test_the_driver_of_a_ray_is_noted_also_if_its_start_is_interrupted(started, monkeypatch, tmp_path):
    def interrupted(**settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(ray_private, "ray_folder", lambda: tmp_path / "ray")
    early, noted = tmp_path / "ray" / f"{ray_private.OWNER_FILE}-{os.getpid()}", tmp_path / ray_private.OWNER_FILE
    ray_private.start_on_loopback()
    assert noted.read_text().startswith(f"{os.getpid()} ") and not early.exists()
    ray_private.ray.init = interrupted
    with pytest.raises(KeyboardInterrupt):
        ray_private.start_on_loopback()
    assert early.read_text() == noted.read_text()


@pytest.mark.parametrize(("is_own", "keeps", "stays"), [(True, False, False), (True, True, True), (False, False, True)])
def test_the_session_folder_of_an_own_ray_is_removed_at_its_end_unless_its_logs_are_wanted(
    monkeypatch, tmp_path, is_own, keeps, stays
):
    session, calls = tmp_path / "session_1", []
    (session / "logs").mkdir(parents=True)
    (session / "logs" / "raylet.out").touch()
    (tmp_path / "session_latest").symlink_to(session)
    monkeypatch.setattr(ray_private, "_started_in", {tmp_path} if is_own else set())
    removes = shutil.rmtree

    def late(folder, **settings):  # a process of Ray's that has not ended yet
        if calls.append(folder) or len(calls) > 1:
            removes(folder, **settings)

    monkeypatch.setattr(ray_private, "ray", SimpleNamespace(shutdown=lambda: None))
    monkeypatch.setattr(ray_private, "logs_folder", lambda: session / "logs")
    monkeypatch.setattr(ray_private.shutil, "rmtree", late)
    ray_private.disconnect(keeps_logs=keeps)
    assert session.exists() == (tmp_path / "session_latest").is_symlink() == stays
    assert not ray_private._started_in, "the next Ray may be that of others"


def test_without_shared_memory_the_object_store_is_in_the_folder_for_temporary_files(started, monkeypatch):
    """Ray itself looks for /dev/shm and does not start without it."""
    monkeypatch.setattr(ray_private, "has_feature", lambda feature: feature != "shared_memory_folder")
    ray_private.start_on_loopback()
    ((_, settings),) = started.found
    assert settings["_plasma_directory"] == tempfile.gettempdir()


def test_a_function_that_is_gone_is_told_and_ray_starts_without_it(started, caplog):
    del started.services.resolve_ip_for_localhost
    with caplog.at_level(logging.WARNING, "raypar"):
        ray_private.start_on_loopback()
        ray_private.silence_deaths()
    assert "no stdout_deduplicator: it prints a text of its own" in caplog.text
    assert len(started.found) == 1
    assert "no resolve_ip_for_localhost: other machines may reach" in caplog.text
    assert not hasattr(started.services, "resolve_ip_for_localhost")


def test_a_token_that_can_no_longer_be_read_is_told_and_not_checked(started, caplog, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setattr(address.socket, "create_connection", lambda *_, **__: SimpleNamespace(close=lambda: None))
    with caplog.at_level(logging.WARNING, "raypar"):
        address.demand_answer("127.0.0.1:6379")
    assert "no AuthenticationTokenLoader" in caplog.text
