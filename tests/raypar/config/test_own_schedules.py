"""Schedules of the user's own, where users name them: runs, files, commands, checkpoints."""

from types import SimpleNamespace

import pytest

import raypar as rp
from raypar.cli.main import run_command
from raypar.cli.train import train as commands
from raypar.config.run import check_run
from raypar.config.toml import plain_of, run_of
from raypar.job.start import resume
from raypar.schedules import Schedule, build, lower

CODE = """\
def wave(num_ranks, num_microbatches):
    return [[f"{rank}{op}{mb}" for op in "FB" for mb in range(num_microbatches)] for rank in range(num_ranks)]
"""


@pytest.fixture
def word(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(CODE)
    return "my.py:wave"


@pytest.fixture
def registered(catalog_as_before):
    rp.register_schedule("wave")(lambda p, m: build("gpipe", p, m).rows)
    return "wave"


def test_a_run_takes_them(word, registered):
    for schedule in (word, registered):
        programs = check_run(rp.Run(schedule=schedule, mesh=rp.Mesh(pp=2), microbatches=3, backward="whole"))
        assert programs["train"].rows == lower(build("gpipe", 2, 3)).rows
        assert programs["evaluate"].forward_only


def test_a_file_keeps_the_word_as_it_is(word):
    run = run_of({"schedule": word, "mesh": {"pp": 2}})
    assert run.schedule == word
    assert run_of(plain_of(run)).schedule == word


def test_a_mistake_in_it_is_one_of_the_mistakes_of_the_run(word, tmp_path):
    (tmp_path / "my.py").write_text(CODE.replace('"FB"', "FB"))
    with pytest.raises(rp.ConfigError) as raised:
        check_run(rp.Run(schedule=word, mesh=rp.Mesh(pp=2, cp=3)))
    assert len(raised.value.faults) == 2
    assert "my.py, line 2): NameError: name 'FB' is not defined" in str(raised.value)


def test_what_is_wrong_with_it_is_told_of_the_training_step():
    rows = ["0B0 0B1", "1F0 1B0 1F1 1B1"]
    with pytest.raises(rp.ConfigError, match="schedule 'mine' breaks"):
        check_run(rp.Run(schedule=Schedule.of("mine", rows), mesh=rp.Mesh(pp=2), microbatches=2))


@pytest.mark.parametrize("command", ["draw", "check", "simulate", "train"])
def test_commands_take_it(word, command, capsys):
    flags = ["--mesh.pp", "2", "--dry-run", "--schedule"] if command == "train" else ["--ranks", "2"]
    assert run_command([command, *flags, word, "--microbatches", "3"]) == 0
    assert "my.py:wave" in capsys.readouterr().out


def test_a_checkpoint_alone_runs_no_code(word, tmp_path, monkeypatch, capsys):
    run = rp.Run(schedule=word, mesh=rp.Mesh(pp=2), data=rp.Text("stdlib"), steps=9)
    found = SimpleNamespace(path=tmp_path / "step-3", manifest=SimpleNamespace(run=plain_of(run), step=3))
    monkeypatch.setattr(resume, "find", lambda path: found)
    monkeypatch.setattr(commands, "resume_faults", lambda *_, **__: [])
    assert run_command(["train", "--resume", "ckpts", "--dry-run"]) == 2
    assert (
        "'my.py:wave' is code, and the checkpoint alone can't make it run: if you trust it, say --schedule my.py"
        in (capsys.readouterr().err)
    )
    assert run_command(["train", "--resume", "ckpts", "--dry-run", "--schedule", word]) == 0
