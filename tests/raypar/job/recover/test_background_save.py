"""When checkpoints are saved, and what becomes of one that fails: with actors that are played."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from raypar.actors.checkpoint.reports import shard_report
from raypar.actors.checkpoint.snapshot import Copies
from raypar.actors.errors import CheckpointError
from raypar.actors.machine.offload_storage import DeviceStorage
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.mesh.world import World
from raypar.actors.specs.run import Run
from raypar.checkpoint import verified
from raypar.job.recover.active_layout import ActiveLayout
from raypar.job.recover.background_save import Saver
from raypar.paths import checkpoints

HOST = DeviceStorage(torch.device("cpu"))


class Actors:
    """Stands for Calls: two actors of a weight each. Those in ``wrong`` fail; nobody writes before ``go`` is set."""

    def __init__(self):
        self.value, self.staged, self.wrong, self.go = 0.0, [], {}, threading.Event()
        self.go.set()
        self.asked, self.besides, self.world = [], [], World(Mesh(pp=2))

    def submit(self, method, *args, group=""):
        if group:
            assert (method, group) == ("write", "disk")
            self.besides.append(args[1])
            return [(rank, copies, args[0]) for rank, copies in enumerate(self.staged)]
        self.asked.append(method)
        if method == "make_room":
            return None
        if method == "probe":
            return [self.wrong.get(rank, f"of {rank}") for rank in range(2)]
        self.staged = [Copies(HOST), Copies(HOST)]
        for rank, copies in enumerate(self.staged):
            copies.take([(f"w{rank}", torch.full((2,), self.value))])
        return None

    def outcomes(self, refs, given_up):
        while not self.go.wait(0.01):
            if given_up.is_set():
                return [RuntimeError("it had not answered")] * 2
        if not isinstance(refs[0], tuple):
            return refs
        written = ((rank, copies.write(Path(folder), f"{rank}")) for rank, copies, folder in refs)
        return [self.wrong.get(rank) or shard_report(one) for rank, one in written]


@pytest.fixture
def actors():
    return Actors()


def saver_of(actors, folder, **changes):
    return Saver(Run(steps=10, folder=str(folder), **changes), actors)


def steps_in(folder):
    return [step for step, _ in checkpoints(folder / "checkpoints")]


def test_when_one_is_due(actors, tmp_path):
    def due(saver):
        assert [saver.next_due(step, 12) for step in range(11)] == [
            next((later for later in range(step + 1, 12) if saver.due(later)), 12) for step in range(11)
        ]
        return [step for step in range(1, 13) if saver.due(step)]

    assert due(saver_of(actors, tmp_path, save_every=4)) == [4, 8, 10, 12]
    assert due(saver_of(actors, tmp_path)) == [10]
    assert due(Saver(Run(steps=10), actors)) == []


def test_training_does_not_wait_for_it_but_the_next_save_does(actors, tmp_path):
    saver = saver_of(actors, tmp_path, save_every=1)
    actors.go.clear()
    saver.after(1)
    assert not (tmp_path / "checkpoints" / "step-00000001").exists()
    actors.value = 5.0
    threading.Timer(0.05, actors.go.set).start()
    assert saver.save(tmp_path / "checkpoints", 2, None).name == "step-00000002"
    assert actors.besides == [True, False]
    assert steps_in(tmp_path) == [2, 1]
    saver.close()


def test_the_last_one_of_a_run_is_waited_for_and_older_ones_go(actors, tmp_path):
    saver = saver_of(actors, tmp_path, save_every=3, keep_last=2)
    for step in range(1, 11):
        saver.after(step)
    assert actors.asked == ["make_room"] + 4 * ["stage"]
    assert actors.besides == [True, True, True, False]  # nothing goes on beside the last one
    assert steps_in(tmp_path) == [10, 9]
    manifest = verified(tmp_path / "checkpoints" / "step-00000010")
    assert sorted(manifest.tensors) == ["w0", "w1"]
    assert manifest.run["save_every"] == 3


def test_closing_finishes_it(actors, tmp_path):
    saver = saver_of(actors, tmp_path, save_every=4)
    actors.go.clear()
    saver.after(4)
    threading.Timer(0.05, actors.go.set).start()
    saver.close()
    assert steps_in(tmp_path) == [4]


def test_what_actors_are_asked_beside_steps_is_answered_when_closed(actors, tmp_path):
    saver, told = saver_of(actors, tmp_path, save_every=4), []
    actors.go.clear()
    saver.ask(["events", "events"], lambda *answers: told.append(answers))
    saver.after(4)
    assert not told
    threading.Timer(0.05, actors.go.set).start()
    saver.close()
    assert told == [(["of 0", "of 1"], ["of 0", "of 1"])]
    assert steps_in(tmp_path) == [4]


def test_an_actor_that_can_not_answer_is_let_be(actors, tmp_path):
    saver, told = saver_of(actors, tmp_path), []
    actors.wrong = {1: RuntimeError("it died")}
    saver.ask(["events"], told.append)
    saver.close()
    assert not told


def test_a_run_that_failed_gives_it_up_and_leaves_nothing(actors, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("raypar.job.recover.background_save._GRACE", 0.02)
    saver = saver_of(actors, tmp_path, save_every=4)
    actors.go.clear()
    saver.after(4)
    saver.close(hurried=True)
    assert "actor pp=1: it had not answered" in caplog.text
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".lock"]


def test_a_failure_warns_with_all_that_is_wrong_and_the_next_one_is_saved(actors, tmp_path, caplog):
    saver = saver_of(actors, tmp_path, save_every=1)
    actors.wrong = {0: CheckpointError(["no space", "no luck"]), 1: RuntimeError("it died")}
    with caplog.at_level(logging.WARNING):
        saver.after(1)
        saver.close()
    assert [record.getMessage() for record in caplog.records] == [
        "no checkpoint of step 1 was saved:\n- actor pp=0: no space\n- actor pp=0: no luck\n- actor pp=1: it died"
    ]
    actors.wrong = {}
    saver = saver_of(actors, tmp_path)
    assert saver.save(tmp_path / "checkpoints", 2, 1) == tmp_path / "checkpoints" / "step-00000002"


def test_a_folder_that_is_taken_warns_too(actors, tmp_path, caplog):
    (tmp_path / "file").touch()
    saver_of(actors, tmp_path / "file").after(10)
    assert "give a path that is a folder" in caplog.text


def test_a_last_checkpoint_that_is_missing_is_known(actors, tmp_path, caplog):
    saver = saver_of(actors, tmp_path, save_every=4)
    for step in range(1, 10):
        saver.after(step)
    saver.settle()
    assert (saver.newest.name, saver.lost) == ("step-00000008", None)
    actors.wrong = {1: CheckpointError(["no space left"])}
    saver.after(10)
    assert "no checkpoint of step 10 was saved; the newest is step-00000008: actor pp=1: no space" in caplog.text
    assert saver.newest.name == "step-00000008"
    assert "no space left" in str(saver.lost)
    actors.wrong = {}
    saver.save(tmp_path / "checkpoints", 10, None)
    assert (saver.newest.name, saver.lost) == ("step-00000010", None)
    saver.close()


def test_a_folder_that_refuses_the_last_checkpoint_is_known(actors, tmp_path):
    saver = saver_of(actors, tmp_path)
    (tmp_path / "checkpoints").write_text("a file in its place")
    saver.after(10)
    assert saver.newest is None and isinstance(saver.lost, CheckpointError)
    saver.close()


def test_checkpoints_that_became_a_link_are_not_written_through_it(actors, tmp_path, caplog):
    (tmp_path / "other").mkdir()
    saver = saver_of(actors, tmp_path)
    (tmp_path / "checkpoints").symlink_to("other")
    saver.after(10)
    assert "checkpoints' is a symbolic link, and raypar writes through none: remove it" in caplog.text
    assert not list((tmp_path / "other").iterdir()) and saver.lost is not None
    saver.close()


def test_what_a_run_that_ends_has_in_memory_is_its_newest_checkpoint_and_no_error_of_it_is_the_run_s(
    actors, tmp_path, caplog
):
    saver = saver_of(actors, tmp_path)

    def fails():
        raise OSError("Ray is gone\nwith a trace")

    saver.save_last(fails)
    saver.save_last(lambda: None)
    assert saver.newest is None
    assert "what its actors have in memory was not saved: Ray is gone" in caplog.text and "trace" not in caplog.text
    saver.save_last(lambda: tmp_path / "step-00000003")
    assert saver.newest == tmp_path / "step-00000003"
    saver.close()


def test_an_end_is_recorded_with_the_checkpoint_to_which_a_resumed_run_goes_back(actors, tmp_path):
    saver, loaded = saver_of(actors, tmp_path, save_every=2), SimpleNamespace(run=Run(folder=str(tmp_path)))
    layout = SimpleNamespace(loaded=loaded, _found=None)
    assert ActiveLayout.resume_point(layout) == (0, "")
    saver.after(2)
    saver.settle()
    actors.wrong = {0: RuntimeError("it was killed")}
    saver.after(4)
    saver.close()
    assert ActiveLayout.resume_point(layout) == (2, "step-00000002")
    begun = SimpleNamespace(path=tmp_path / "step-00000009", manifest=SimpleNamespace(step=9))
    elsewhere = SimpleNamespace(loaded=SimpleNamespace(run=Run(folder=None)), _found=begun)
    assert ActiveLayout.resume_point(elsewhere) == (9, "step-00000009")
