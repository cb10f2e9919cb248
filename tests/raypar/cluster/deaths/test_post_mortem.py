"""What is told of an actor that died: its exit, last action and log, in the error, the failure and the folder."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time

import pytest
import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RaySystemError, RuntimeEnvSetupError
from torch import nn

import raypar as rp
from raypar.actors.mesh.world import World
from raypar.cluster.calls.calls import Calls
from raypar.cluster.deaths import worker_logs
from raypar.cluster.deaths.post_mortem import death_of
from raypar.cluster.deaths.process_monitor import Exit, ProcessMonitor, ProcessReport
from raypar.cluster.deaths.process_monitors import ProcessMonitors
from raypar.cluster.nodes.probes import ray_error_reason
from raypar.paths import FAILURES
from raypar.reporting.run_folder.read import read
from tests.support.kernel import TELLS_EXITS
from tests.support.process_tree import lives

CRASH = """:job_id:01000000
:actor_name:RayparActor
loaded
*** SIGSEGV received at time=1795618465 on cpu 0 ***
PC: @     0x7fab6e985ad8  (unknown)  (unknown)
    @     0x7fab6e85a050  (unknown)  (unknown)
[2026-11-25 14:54:25,907 E 31804 31890] logging.cc:474: *** SIGSEGV received at time=1795618465 on cpu 0 ***
Fatal Python error: Segmentation fault

Stack (most recent call first):
  File "/x/mine.py", line 11 in forward
  File "/x/torch/module.py", line 1 in call
Extension modules: msgpack._cmsgpack (total: 15)
"""


def ended(*how, **known):
    """What knows processes of which one has ended in a given way."""
    witnesses = ProcessMonitors()
    witnesses._own = Ended(*how, **known)
    return witnesses


class Ended(ProcessMonitor):
    """Processes of which one has ended in a given way."""

    def __init__(self, exit_=None, kills=0, number=None):
        super().__init__()
        self._exit, self._new, self._number = exit_, kills, number

    def exit_of(self, rank):
        return self._exit

    def new_memory_kills(self):
        return self._new

    def number(self, rank):
        return self._number


def died(text):
    """An error of Ray with its text."""
    error = ActorDiedError()
    error.error_msg = f"The actor died unexpectedly before finishing this task.\n\tclass_name: RayparActor\n{text}"
    return error


def test_each_end_is_told_by_its_name():
    lost, raised = died("Worker exit detail: End of file. (1) the process was killed by the OOM killer"), died("")
    raised.error_msg = "The actor died because of an error raised in its creation task, ray::A()\nValueError: no"
    memory = OutOfMemoryError("Memory on the node (IP: 1.2.3.4) was 4.93GB used / 23.54GB limit (0.2)\nMore")
    for error, exit_, kills, cause, is_short in (
        (lost, None, 0, "", False),
        (lost, Exit(None, "SIGSEGV"), 1, "ended by SIGSEGV", False),
        (lost, Exit(None, "SIGKILL"), 0, "ended by SIGKILL", False),
        (lost, Exit(None, "SIGKILL"), 1, "ended by SIGKILL, by the kernel, it seems, which has just ended", True),
        (lost, Exit(3, ""), 0, "ended with exit code 3, by os._exit, sys.exit or a library", False),
        (died("Worker exits with an exit code 4."), None, 0, "ended with exit code 4", False),
        (died("Exit code: 1. The process receives a SIGTERM."), Exit(1, ""), 0, "ended by SIGTERM", False),
        (died("The actor is dead because it was killed by `ray.kill`."), None, 0, "ended by ray.kill", False),
        (died("The actor died because its node has died. Node Id: 7"), None, 0, "on a node that died", False),
        (raised, None, 0, "ended by an exception in its constructor: ValueError: no", False),
        (memory, None, 0, "ended by Ray's memory monitor, because its node was short of memory (4.93GB of", True),
        (RaySystemError("broken"), None, 0, "lost (RaySystemError: ", False),
    ):
        death = death_of(error, 0, ended(exit_, kills))
        assert death.cause.startswith(cause), death
        assert bool(death.cause) == bool(cause)
        assert death.out_of_memory is is_short
    assert str(death_of(lost, 0, ended())) == "Why it died is not known."


def test_a_node_that_does_not_answer_is_told(monkeypatch):
    witnesses = ProcessMonitors()
    monkeypatch.setattr(witnesses, "seen", lambda *_: ProcessReport(is_silent=True))
    assert str(death_of(died("End of file"), 0, witnesses)) == (
        "It was lost with its node, it seems, which does not answer."
    )
    assert death_of(died("because its node has died"), 0, witnesses).cause == "on a node that died"
    ended_so = died("the actor's node was terminated expectedly: received SIGTERM because its node has died")
    assert death_of(ended_so, 0, witnesses).cause == "on a node whose Ray was ended by SIGTERM"
    ended_so._preempted = True  # as Ray makes it
    death = death_of(ended_so, 0, witnesses)
    assert death.is_preempted and death.cause == "on a node that was taken away (preempted)"


def test_a_log_is_told_without_rays_lines_and_a_crash_from_its_innermost_frame(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_logs, "logs_folder", lambda: tmp_path)
    (tmp_path / "worker-abc-01-77.out").write_text(":job_id:01\nhello\n")
    (tmp_path / "worker-abc-01-77.err").write_text(":job_id:01\n")
    assert death_of(died(""), 0, ended(number=77)).log == ("hello",)
    (tmp_path / "worker-abc-01-77.err").write_text("".join(f"line {i}\n" for i in range(10_000)))
    assert death_of(died(""), 0, ended(number=77)).log == tuple(f"line {i}" for i in range(9988, 10_000))
    (tmp_path / "worker-abc-01-77.err").write_text(CRASH)
    death = death_of(died(""), 0, ended(number=77))
    assert death.signal == "SIGSEGV"
    assert death.log == (
        "Fatal Python error: Segmentation fault",
        "Stack (most recent call first):",
        '  File "/x/mine.py", line 11 in forward',
        '  File "/x/torch/module.py", line 1 in call',
    )
    assert f"Its log, {tmp_path}/worker-abc-01-77.err, ends with:\n    Fatal Python error" in str(death)
    assert not death_of(died("\tpid: 77\n\tip: 9.9.9.9\n"), 0, ended()).log, "another node's process"
    monkeypatch.setattr(worker_logs, "logs_folder", lambda: None)
    assert not death_of(died(""), 0, ended(number=77)).log


@pytest.mark.parametrize(("addresses", "is_used"), [(["9.9.9.8", "9.9.9.9"], True), (["9.9.9.9", "9.9.9.9"], False)])
def test_a_number_in_rays_text_is_not_used_where_containers_share_an_address(addresses, is_used, tmp_path, monkeypatch):
    monkeypatch.setattr(worker_logs, "logs_folder", lambda: tmp_path)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "9.9.9.9")
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeManagerAddress": address} for address in addresses])
    (tmp_path / "worker-abc-01-77.err").write_text("hello\n")
    death = death_of(died("\tpid: 77\n\tip: 9.9.9.9\n"), 0, ended())
    assert death.log == (("hello",) if is_used else ())


def test_an_actor_that_rays_memory_monitor_ends_has_died():
    memory = OutOfMemoryError("Memory on the node was 4.93GB used / 23.54GB limit (0.2)\nObject store: ...")
    verdict = Calls([], World(rp.Mesh(pp=2)), 1.0, monitors=ended())._verdict({1: memory}, [], "step 3")
    assert isinstance(verdict, rp.ActorDiedError)
    assert str(verdict) == "actor pp=1 died during step 3"
    assert verdict.__notes__[0].startswith("It was ended by Ray's memory monitor")


def test_what_ray_says_of_memory_and_of_runtime_environments_is_passed_on():
    over = "Memory on the node was 5.86GB used / 23.54GB limit (0.249), which exceeds the threshold of 0.25. Ray killed"
    told = death_of(OutOfMemoryError(over), 0, ended()).cause
    assert told.endswith("(5.86GB of 23.54GB were used, above the 0.25 of RAY_memory_usage_threshold)")
    told = death_of(OutOfMemoryError(over.replace("0.25.", "6774102528 bytes.")), 0, ended()).cause
    assert told.endswith("(5.86GB of 23.54GB were used, above the 6.31GB of RAY_memory_usage_threshold)")
    broken = RuntimeEnvSetupError("no such package\nERROR: No matching distribution found for nothing==1")
    wanted = "Failed to set up runtime environment. ERROR: No matching distribution found for nothing==1"
    assert death_of(broken, 0, ended()).cause == f"lost (RuntimeEnvSetupError: {wanted})"
    assert ray_error_reason(broken) == f"RuntimeEnvSetupError: {wanted}"


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_a_crash_and_an_exit_are_told_in_the_failure_the_folder_and_the_error(tmp_path):
    class Dying(nn.Linear):
        def forward(self, x):
            for file in tmp_path.glob("now-*"):
                file.unlink()
                print("about to end", file=sys.stderr)
                if file.name == "now-crash":
                    ctypes.string_at(0)
                if file.name == "now-exit":
                    os._exit(3)
                os.kill(os.getpid(), signal.SIGTERM)
            return super().forward(x)

    model = rp.Layers(lambda: [nn.Linear(4, 4), Dying(4, 4)], nn.functional.mse_loss)
    fields = {"mesh": rp.Mesh(pp=2), "microbatches": 2, "steps": 4, "folder": str(tmp_path / "run"), "max_failures": 2}
    batches = rp.Batches(lambda step, microbatch, dp: 2 * (__import__("torch").ones(3, 4),))
    with rp.launch(rp.Run(model=model, data=batches, **fields)) as job:
        (tmp_path / "now-term").touch()
        pid = job.who()[1].pid
        job.step()  # whoever gets a SIGTERM ends its step first
        for _ in range(200):
            if not lives(pid):
                break
            time.sleep(0.05)
        (tmp_path / "now-crash").touch()
        job.step()
        (tmp_path / "now-exit").touch()
        with pytest.raises(rp.ActorDiedError, match=r"actor pp=1 died during step 3") as caught:
            job.step()
        told, failure = job.failures
    assert (told.step, told.back_to, told.death.cause) == (2, 1, "ended by SIGTERM")
    assert (failure.death.signal, failure.death.last_action) == ("SIGSEGV", "1F0 of step 2")
    assert any("string_at" in line for line in failure.death.log)
    assert failure.lost >= failure.seconds > 0
    death = caught.value.death
    if TELLS_EXITS:
        assert (death.exit_code, death.cause) == (3, "ended with exit code 3, by os._exit, sys.exit or a library")
        assert str(death).startswith(
            f"It was {death.cause}; it died in or after 1F0 of step 3, the last action that it began. Its log, "
        )
    assert caught.value.__notes__[0] == str(death)
    assert death.log[-1] == "about to end"
    lines = [json.loads(line) for line in (tmp_path / "run" / FAILURES).read_text().splitlines()]
    assert [(line["step"], line["is_end"], line["death"]["signal"]) for line in lines[1:]] == [
        (2, False, "SIGSEGV"),
        (3, True, ""),
    ]
    assert (lines[-1]["back_to"], lines[-1]["source"]) == (2, "step-00000002"), "saved from memory"
    assert read(tmp_path / "run").failures == lines
