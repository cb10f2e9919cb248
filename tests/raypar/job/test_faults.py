"""Jobs that go wrong: what is said, how soon, and that nothing is left running."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.cluster.lifecycle.ray_cluster import _own_sigterm
from raypar.errors import RoomError
from tests.support.team import Team

pytestmark = pytest.mark.usefixtures("by_value")


class Trouble(nn.Module):
    """A linear layer that counts its forwards, sleeps before each, and raises at one of them."""

    def __init__(self, fails_at=0, sleep=0.0):
        super().__init__()
        self.inner, self.calls, self.fails_at, self.sleep = nn.Linear(4, 4), 0, fails_at, sleep

    def forward(self, x):
        self.calls += 1
        if self.calls == self.fails_at:
            raise ZeroDivisionError("the user's own message")
        time.sleep(self.sleep)
        return self.inner(x)


def batch(step, microbatch, dp):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + microbatch))
    return x, x.sin()


def poisoned(step, microbatch, dp):
    x, y = batch(step, microbatch, dp)
    return x, y * float("inf") if step == 1 and microbatch == 2 else y


def run_of(fn, data=batch, **changes):
    fields = {"mesh": rp.Mesh(pp=2), "microbatches": 4, "optim": rp.SGD(lr=0.1), "steps": 5, "timeout": 60.0}
    return rp.Run(model=rp.Layers(fn, nn.functional.mse_loss), data=rp.Batches(data), **(fields | changes))


def pids(job):
    from raypar.cluster.calls.calls import ray

    def pid(worker):
        return os.getpid()

    return ray.get([handle.__ray_call__.remote(pid) for handle in job._loop.loaded.handles])


def gone(pid, within=5.0):
    """Whether a process has ended (a zombie has)."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@contextmanager
def later(seconds, act):
    """Do something while a step runs; yields the list that gets the time of it."""
    done = []

    def do():
        done.append(time.monotonic())
        act()

    timer = threading.Timer(seconds, do)
    timer.start()
    try:
        yield done
    finally:
        timer.cancel()


# --- launches that fail, wait, or are slow ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["interrupted", "in vain"])
def test_a_launch_that_waits_for_room_leaves_no_claim_behind(cluster, monkeypatch, caplog, how):
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    claims = [claim for claim in placement_group_table().values() if claim["state"] == "CREATED"]
    held = sum(bundle["CPU"] for claim in claims for bundle in claim["bundles"].values())
    names = {claim["name"] for claim in claims} | {"", "a tenant"}
    caplog.set_level(logging.INFO, "raypar")

    def claimed():
        return [claim["state"] for claim in placement_group_table().values() if claim["name"] not in names]

    def press_while_it_waits():
        while "PENDING" not in claimed():
            time.sleep(0.05)
        time.sleep(0.5)
        press()

    start, taken = time.monotonic(), placement_group([{"CPU": 15.0 - held}], name="a tenant")
    assert taken.wait(30)
    try:
        if how == "interrupted":
            with later(0.2, press_while_it_waits), pytest.raises(KeyboardInterrupt):
                rp.launch(run_of(lambda: [nn.Linear(4, 4)] * 2))
        else:
            monkeypatch.setattr("raypar.cluster.lifecycle.claims._SAY", 0.5)
            says = r"2 actors need 2 CPUs, the cluster has 16 \(0 free\).*within 2 s.*; room for 1 of 2 actors is there"
            with pytest.raises(RoomError, match=says) as caught:
                rp.launch(run_of(lambda: [nn.Linear(4, 4)] * 2), wait_for_room=2.0)
            holds = f"; of the CPUs hold a tenant {15 - held:.0f}"
            assert holds in str(caught.value)
            waits = [text for text in caplog.messages if "waited for, " in text]
            assert waits and all(holds in text for text in waits)
        assert time.monotonic() - start < 10, "Ctrl-C was not heard"
        assert set(claimed()) == {"REMOVED"}
    finally:
        remove_placement_group(taken)


def test_a_handler_of_sigterm_outlives_rays():
    def mine(number, frame):
        pass

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with _own_sigterm():
            signal.signal(signal.SIGTERM, lambda number, frame: None)
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def broken():
    raise ZeroDivisionError("while building")


def test_a_model_that_can_be_built_only_here_fails_the_launch_with_its_message(kept_actors):
    home = os.getpid()

    def only_here():
        if os.getpid() != home:
            raise KeyError("not at home")
        return [nn.Linear(4, 4), nn.Linear(4, 4)]

    with pytest.raises(rp.JobError, match="the launch failed: KeyError: 'not at home'"):
        rp.launch(run_of(only_here))
    with pytest.raises(
        rp.ConfigError, match=r"model.fn fails at .*test_faults.py:\d+, ZeroDivisionError: while building"
    ):
        rp.launch(run_of(broken))
    for nothing in (lambda: nn.Linear(4, 4), lambda: None, list):
        with pytest.raises(rp.ConfigError, match=r"model.fn must return a list of nn.Modules, one or more"):
            rp.launch(run_of(nothing))


def test_a_short_timeout_does_not_hold_for_the_launch(kept_actors, monkeypatch):
    monkeypatch.setattr("raypar.cluster.calls.calls._GRACE", 0.1)
    home = os.getpid()

    def slowly():
        if os.getpid() != home:
            time.sleep(2.0)
        return [nn.Linear(4, 4), nn.Linear(4, 4)]

    with rp.launch(run_of(slowly, timeout=0.3)) as job:
        assert job.step().step == 0


# --- numbers that are not finite -------------------------------------------------------------------------------------


@pytest.fixture
def poisoned_job(job_of):
    return job_of(run_of(lambda: [nn.Linear(4, 4), nn.Linear(4, 4)], data=poisoned))


def test_a_loss_that_is_not_finite_changes_nothing_and_the_job_goes_on(poisoned_job):
    job = poisoned_job
    job.step()
    before = dict(job.weights())
    with pytest.raises(
        rp.NonFiniteError,
        match=r"step 2: the loss is not finite, nor are the gradients of 4 of 4 parameters \(layers.0.weight",
    ):
        job.step()
    assert job.next_step == 1
    after = dict(job.weights())
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    job.next_step = 2  # past the bad batch
    assert job.step().step == 2
    after = dict(job.weights())
    assert not torch.equal(before["layers.0.weight"], after["layers.0.weight"])


def test_steps_handed_over_ahead_are_refused_behind_one_that_could_not_be_made(poisoned_job):
    job = poisoned_job
    with pytest.raises(rp.NonFiniteError, match="step 2: "):
        job.train(6, ahead=3)
    assert job.next_step == 1
    before = dict(job.weights())
    with pytest.raises(rp.NonFiniteError, match="step 2: "):
        job.step()
    assert all(torch.equal(weight, before[name]) for name, weight in job.weights().items())
    job.next_step = 2  # past the bad batch
    assert [report.step for report in job.train(2, ahead=1)] == [2, 3]


def test_an_actor_without_an_answer_is_blamed_only_where_nobody_has_an_error_of_his_own():
    from ray.exceptions import RayTaskError

    from raypar.actors.errors import ActionError
    from raypar.actors.mesh.world import World
    from raypar.cluster.calls.calls import Calls

    def verdict(secondary):
        error = RayTaskError("step", "", ActionError("pp=0", "0F0", None, "it", secondary, ""))
        return str(Calls([], World(rp.Mesh(pp=2)), 1.0)._verdict({0: error}, [1], "step 0"))

    assert verdict(secondary=True).startswith(
        "actor pp=1 gives no answer, stopped or out of reach, during step 0; seen from the others: actor pp=0: "
    )
    assert verdict(secondary=False).startswith("actor pp=0: action 0F0 failed: it (during step 0)")


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_waits_for_the_step_and_leaves_a_usable_job(job_of, caplog):
    slow = run_of(lambda: [Trouble(sleep=0.05), Trouble(sleep=0.05)], steps=8)
    job, seen = job_of(slow), []

    def on(report):
        seen.append(report)
        if len(seen) == 2:  # the driver waits for the next step soon, which takes a quarter of a second
            threading.Timer(0.1, press).start()

    with pytest.raises(KeyboardInterrupt):
        job.train(on=on, ahead=1)
    assert 0 < job.next_step < 8
    assert "Ctrl-C: waiting for the actors to finish" in caplog.text
    assert [report.step for report in seen] == list(range(job.next_step)), "what the actors had is displayed"
    with later(0.1, press), pytest.raises(KeyboardInterrupt):
        job.step()
    assert job.next_step > len(seen), "the step that was under way counts"
    stepper = job.stepper()
    with later(0.1, press), pytest.raises(KeyboardInterrupt):
        stepper.run()
    assert not stepper.ready(), "the moves that were under way count"
    stepper.finish()
    job.train()
    interrupted = dict(job.weights())
    job.reset(slow)
    job.train()
    assert all(torch.equal(weight, interrupted[name]) for name, weight in job.weights().items())


class Pressing:
    """An actor during the ``at``-th of whose calls Ctrl-C is pressed."""

    def __init__(self, handle, at):
        self.handle, self.left = handle, at

    def __getattr__(self, method):
        called = getattr(self.handle, method)

        def remote(*args):
            self.left -= 1
            if not self.left:
                press()
            return called.remote(*args)

        return SimpleNamespace(remote=remote, options=called.options)


@pytest.mark.sampled
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_was_handed_over_counts_whenever_ctrl_c_comes(job_of, rank):
    """Also in between the calls that hand it over, when only some of the actors have it."""
    run = run_of(lambda: [Trouble(), Trouble()], steps=6)
    job = job_of(run)
    losses = [report.loss for report in job.train()]
    for at in (1, 2, 3):
        job.reset(run)
        calls = job._loop.loaded.calls
        handles = calls._handles
        calls._handles = [Pressing(handle, at) if i == rank else handle for i, handle in enumerate(handles)]
        with pytest.raises(KeyboardInterrupt):
            job.train(ahead=1)
        calls._handles = handles
        done = job.next_step
        assert 0 < done < 6
        assert [report.loss for report in job.train()] == losses[done:]


@pytest.mark.long
def test_a_second_ctrl_c_ends_the_job(cluster):
    job = rp.launch(run_of(lambda: [Trouble(sleep=0.5), Trouble(sleep=0.5)]))
    actors, start = pids(job), time.monotonic()
    with later(0.3, press), later(0.6, press), pytest.raises(KeyboardInterrupt):
        job.step()
    assert time.monotonic() - start < 2, "a step takes longer"
    with pytest.raises(rp.JobError, match=r"this job is over \(it was interrupted while its actors worked"):
        job.step()
    assert all(map(gone, actors))


# --- a user's exception ----------------------------------------------------------------------------------------------


def test_an_exception_in_a_layer_names_actor_action_and_message_and_how_to_go_on(cluster, tmp_path):
    kept = {"folder": str(tmp_path / "run"), "save_every": 1}
    job = rp.launch(run_of(lambda: [nn.Linear(4, 4), Trouble(fails_at=7)], **kept))
    actors = pids(job)
    job.train(1)  # it returns when the checkpoint is whole
    start = time.monotonic()
    with pytest.raises(rp.JobError) as caught:
        job.step()
    assert time.monotonic() - start < 5
    text = str(caught.value)
    assert text.startswith(
        "actor pp=1: action 1F2 failed: ZeroDivisionError: the user's own message (in layers.1) (during step 2)"
    )
    assert 'raise ZeroDivisionError("the user' in text, "where it happened"
    (note,) = caught.value.__notes__
    assert note == f"To go on, launch the run again with resume={str(tmp_path / 'run')!r} (step-00000001)."
    with pytest.raises(rp.JobError, match=r"this job is over \(actor pp=1: action 1F2 failed.*launch the run again"):
        job.step()
    assert all(map(gone, actors))


def test_the_schedule_does_not_change_what_is_said_of_an_exception():
    """Threads for actors: what a job says begins with what the actor has raised."""
    team = Team.of(run_of(lambda: [nn.Linear(4, 4), Trouble(fails_at=7)], schedule="gpipe", timeout=1.0))
    team.step()
    *_, error = team.each(lambda actor: actor.train(1))
    assert str(error) == "actor pp=1: action 1F2 failed: ZeroDivisionError: the user's own message (in layers.1)"
    assert not error.secondary
    assert 'raise ZeroDivisionError("the user' in error.trace


# --- a dead actor, a stopped actor -----------------------------------------------------------------------------------


def test_a_killed_actor_is_named_within_seconds_and_nothing_is_left(cluster, capsys):
    with rp.launch(run_of(lambda: [nn.Linear(4, 4), Trouble(sleep=0.5)])) as job:
        actors = pids(job)
        with later(0.7, lambda: os.kill(actors[1], signal.SIGKILL)) as killed:
            with pytest.raises(rp.ActorDiedError, match=r"actor pp=1 died during step 1"):
                job.step()
            took = time.monotonic() - killed[0]
        with capsys.disabled():
            print(f" [raised {took:.2f} s after the kill]", end="")
        assert took < 5
        with pytest.raises(rp.JobError, match="this job is over"):
            job.step()
        assert all(map(gone, actors))


@pytest.mark.long
def test_a_stopped_actor_is_told_within_its_deadline_and_gone_after_close(cluster, capsys, caplog):
    """The last one; that a stopped first one is named is tested in recovery/test_recovery.py."""
    timeout, victim = 2.0, 1
    run = run_of(lambda: [Trouble(sleep=0.2), Trouble(sleep=0.2)], microbatches=8, timeout=timeout)
    with rp.launch(run) as job:
        actors = pids(job)
        try:
            with later(0.5, lambda: os.kill(actors[victim], signal.SIGSTOP)) as stopped:
                with pytest.raises(rp.JobError, match=rf"pp={victim}") as caught:
                    for _ in range(20):
                        job.step()
                raised = time.monotonic()
            (told,) = (record for record in caplog.records if record.name == "raypar.job.start.lifetime")
            assert told.getMessage() == str(caught.value).splitlines()[0]
            took = raised - stopped[0] - (time.time() - told.created) + (time.monotonic() - raised)
            with capsys.disabled():
                print(
                    f" [told {took:.2f} s, raised {raised - stopped[0]:.2f} s after the stop: {caught.value}]", end=""
                )
            assert took < timeout + 1, "before the actors are ended, which takes seconds"
            assert all(map(gone, actors)), "also the stopped one"
        finally:
            for pid in actors:
                if not gone(pid, 0.1):
                    os.kill(pid, signal.SIGKILL)


# --- a program and the cluster it started ----------------------------------------------------------------------------

PROGRAM = """
import json, os, signal, sys, threading, time
import ray  # before raypar, which silences what ray prints of its own
import torch
from torch import nn
import raypar as rp

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
    def forward(self, x):
        time.sleep(SLEEP)
        return self.inner(x)

def batch(step, microbatch, dp):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sin()

SLEEP = {sleep}
run = rp.Run(model=rp.Layers(lambda: [Slow(), Slow()], nn.functional.mse_loss), data=rp.Batches(batch),
             mesh=rp.Mesh(pp={pp}), microbatches=2, optim=rp.SGD(lr=0.1), steps=3,
             offload="parameters", offload_folder={folder!r})
def files_of(pid):
    found = [os.readlink(f"/proc/{{pid}}/fd/{{name}}") for name in os.listdir(f"/proc/{{pid}}/fd")]
    return [file for file in found if file.startswith({folder!r})]
def from_a_thread():
    # what Ray starts ends with the thread that has started it, so that has to be another one than this
    found = []
    thread = threading.Thread(target=lambda: found.append(rp.launch(run)))
    thread.start()
    thread.join()
    time.sleep(1)
    return found[0]

with {launch} as job:
    pids = ray.get([h.__ray_call__.remote(lambda w: os.getpid()) for h in job._loop.loaded.handles])
    session = ray._private.worker._global_node.get_session_dir_path()
    doors = ray.util.get_node_ip_address(), oct(os.stat(session).st_mode & 0o777)
    files = [files_of(pid) for pid in pids]
    print(json.dumps({{"pids": pids, "session": session, "doors": doors, "files": files}}), flush=True)
    {body}
"""

ENDS = {
    "an actor killed": (
        "0.5",
        "threading.Timer(0.7, lambda: os.kill(pids[1], signal.SIGKILL)).start(); job.train()",
        1,
        "ActorDiedError: actor pp=1 died during step",
    ),
    "interrupted, launched by a thread": (
        "0.5",
        "threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGINT)).start(); job.train()",
        None,
        "KeyboardInterrupt",
    ),
    "terminated, and slow to end": (
        "0.5",
        "close = job.close; job.close = lambda: (time.sleep(3.5), close()); "
        "threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGTERM)).start(); job.train()",
        1,  # as Ray's Python handler has it; its other one would abort after 3 s
        "",
    ),
}


def of_session(session):
    """Processes that name a Ray session in their command line or environment."""
    name, found = Path(session).name.encode(), {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if (name in line or name in environment) and state != "Z":
                found[int(entry.name)] = line.replace(b"\0", b" ").decode()[:100]
    return found


def environment():
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return kept | {"RAY_AUTH_MODE": "disabled"}


def said(script):
    """What a program said, and its return code."""
    return subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment(), timeout=90)


def performed(script):
    """What a program said, its return code, and what of its Ray session is left within ten seconds."""
    done = said(script)
    end = time.monotonic() + 10
    printed = json.loads(done.stdout.splitlines()[0])
    while (left := of_session(printed["session"])) and time.monotonic() < end:
        time.sleep(0.1)
    return done, printed, left


def script_of(end, folder):
    """A program that ends so, and the folder of what it offloads."""
    sleep, body, _, _ = ENDS[end]
    launch = "from_a_thread()" if "thread" in end else "rp.launch(run)"
    script, offload = folder / "program.py", folder / "offload"
    offload.mkdir()
    pp = 2 if "pids[1]" in body else 1
    script.write_text(PROGRAM.format(sleep=sleep, body=body, launch=launch, pp=pp, folder=str(offload)))
    return script, offload


@pytest.mark.long
@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_ends_leaves_no_process_no_shared_memory_and_no_offloaded_file(tmp_path, end):
    _, _, code, says = ENDS[end]
    script, offload = script_of(end, tmp_path)
    done, printed, left = performed(script)
    assert says in done.stderr, done.stderr
    if "killed" in end:
        head, found, _ = done.stderr.partition(says.removeprefix("ActorDiedError: "))
        assert found, done.stderr
        assert not re.search(r"\bray\b|raylet|ray::", head), f"Ray's own words stand before raypar's: {head}"
        assert "A worker died" not in done.stderr
    assert done.returncode == code or code is None, done.stderr
    assert not left
    assert all(len(files) == 1 and files[0].endswith("(deleted)") for files in printed["files"]), printed["files"]
    assert not list(offload.iterdir()), "a file without a name ends with its actor, however that ends"
    assert printed["doors"] == ["127.0.0.1", "0o700"], "a Ray of our own is open to this user on this machine only"
    assert all(map(gone, printed["pids"]))
    assert Path(printed["session"]).exists() == ("killed" in end), "the logs of a failure are kept, and only they"
    marks = [Path(printed["session"]).name, *map(str, printed["pids"])]
    assert not [path for path in Path("/dev/shm").iterdir() if any(mark in path.name for mark in marks)]


def test_of_errors_that_are_not_finite_the_first_router_is_told():
    from ray.exceptions import RayTaskError

    from raypar.actors.errors import RouterError
    from raypar.actors.mesh.world import World
    from raypar.cluster.calls.calls import Calls

    made = [rp.NonFiniteError("a"), RouterError("b"), RouterError("c")]
    errors = {rank: RayTaskError("step", "", error) for rank, error in enumerate(made)}
    assert Calls([], World(rp.Mesh(pp=3)), 1.0)._verdict(errors, [], "step 0") is made[1]
