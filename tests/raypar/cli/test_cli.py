"""The command line: what it prints, where, and how it ends. In this process, but for what only a process can show."""

import importlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import raypar as rp
from raypar.actors.errors import NonFiniteError
from raypar.actors.specs.model import Llama
from raypar.actors.specs.optim import Muon
from raypar.cli import main as cli
from raypar.cli.schedules import schedules as paper
from raypar.cli.train import short_runs
from raypar.cli.train import train as commands
from raypar.cli.words.output_files import whole_file
from raypar.cli.words.parsing import _base
from raypar.config.recipes import recipe
from raypar.config.toml import plain_of, toml_of
from raypar.errors import TO_GO_ON, JobError
from raypar.parity.verify import Bounds, Difference, Verdict
from raypar.reporting import summary as summaries
from raypar.schedules import build, lower, to_csv
from tests.support.checkpoints import save_at

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Flags for a small text."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("to be or not to be, that is the question\n" * 200)
    return ["--data.path", str(folder / "a.txt"), "--data.cache", str(folder / "cache")]


def process(*words):
    return subprocess.run(
        [sys.executable, "-m", "raypar.cli.main", *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


# --- in general ------------------------------------------------------------------------------------------------------


def test_help_names_every_command_and_exit_code(said):
    code, out, _ = said("--help")
    assert code == 0
    for word in ["train", "verify", "draw", "check", "simulate", "gallery", "compare", "130", "143", "gpt-124m"]:
        assert word in out
    assert "exit codes:" in out and "without actors, in seconds" in out
    flat = " ".join(out.split())
    assert "130 stopped with Ctrl-C, after a checkpoint if there is a folder and a step was done" in flat
    assert [*dict.fromkeys(re.findall(r"^  raypar ([a-z]+)", out, re.MULTILINE))] == [*cli.COMMANDS]
    assert said("--version") == (0, "raypar 0.1.0\n", "")


def test_a_wrong_command_is_guessed(said):
    code, out, err = said("trian")
    assert (code, out, err) == (2, "", "raypar: there is no command 'trian': did you mean 'train'?\n")
    assert "did you mean 'step'?" in said("repl")[2]
    assert "did you mean 'sft'?" in said("finetune", "talks.jsonl")[2]
    assert "did you mean 'sft talks.jsonl --model FOLDER'?" in said("talks.jsonl")[2]
    assert "for a file of examples give raypar sft talks.jsonl --model FOLDER" in said("train", "talks.jsonl")[2]
    assert "did you mean 'train --resume'?" in said("resume", "runs/a")[2]
    assert "did you mean 'train gpt-tiny'?" in said("gpt-tiny")[2]
    assert said()[0] == 2


@pytest.mark.parametrize("command", ["train", "verify", "draw", "check", "simulate", "compare"])
def test_every_command_has_help(said, command):
    code, out, err = said(command, "--help")
    assert (code, err) == (0, "")
    assert f"usage: raypar {command}" in out


def test_help_and_a_command_is_the_help_of_the_command(said):
    assert said("help", "train", "zero")[1] == said("train", "--help", "zero")[1]
    assert said("--help", "ckpt") == said("ckpt", "--help")
    assert said("--help", "--all") == said("--help") and said("help", "trian")[2].endswith("did you mean 'train'?\n")


def test_the_help_of_train_explains_every_flag(said):
    _, out, _ = said("train", "gpt-tiny", "--help", "all")
    for word in ("--model.layers", "number of transformer blocks", "--mesh.pp", "pipeline ranks", "--split"):
        assert word in out
    assert "(default: 0.003)" in out  # the recipe's, not the class' own
    assert "--optim.momentum" in said("train", "--optim.kind", "sgd", "--help", "all")[1]


@pytest.mark.parametrize(
    "words",
    [
        ("draw",),
        ("draw", "1f1b", "--ranks", "x"),
        ("draw", "1f1b", "--format", "png"),
        ("train", "--modle.layers", "3"),
        ("train", "--steps", "2.5"),
        ("verify", "--log", "x.jsonl"),
    ],
)
def test_a_wrong_flag_is_a_mistake(said, words):
    code, out, err = said(*words)
    assert (code, out) == (2, "")
    assert "raypar" in err
    assert "Traceback" not in err


# --- on paper --------------------------------------------------------------------------------------------------------


def test_draw_writes_text_csv_svg_and_traces(said, tmp_path):
    code, out, _ = said("draw", "gpipe", "--ranks", 2, "--microbatches", 2)
    assert code == 0
    assert out.splitlines()[0] == "rank 0  F0 F1       B0 B1"
    schedule = build("1f1b", 4, 8)
    assert said("draw", "1f1b", "--format", "csv")[1] == to_csv(schedule)
    assert said("draw", "1f1b", "--format", "csv", "--lowered")[1] == to_csv(lower(schedule))
    assert said("draw", "1f1b", "--lowered")[1].startswith("rank 0  0F0      0SEND_F0 ")
    assert json.loads(said("draw", "1f1b", "--format", "json")[1])["traceEvents"]
    for name, start in (("a.svg", "<svg"), ("a.csv", "0F0,"), ("a.json", "{"), ("a.txt", "rank 0")):
        assert said("draw", "1f1b", "--out", tmp_path / name)[0] == 0
        assert (tmp_path / name).read_text().startswith(start)
    assert said("draw", tmp_path / "a.csv")[1].splitlines()[:4] == said("draw", "1f1b")[1].splitlines()[:4]


def test_a_device_or_a_pipe_is_written_and_not_replaced(said, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        assert said("draw", "1f1b", "--format", "csv", "--out", pipe)[0] == 0
        assert reader.read() == to_csv(build("1f1b", 4, 8)).encode()
        with whole_file("--trace", pipe) as write:
            write("a trace")
        assert reader.read() == b"a trace"
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_check_says_what_it_proved(said, tmp_path):
    code, out, _ = said("check", "interleaved", "--ranks", 2, "--microbatches", 4, "--chunks", 3)
    assert code == 0
    assert out.startswith("ok: interleaved, 2 ranks, 6 stages, 4 microbatches")
    assert "8 sends under way" in out
    assert said("check", "1f1b", "--blocking", "--order", "one_sweep")[0] == 0
    path = tmp_path / "halves.csv"
    path.write_text("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    code, out, _ = said("check", path)
    assert code == 0
    assert out.endswith("activations in flight 1 1\n")
    path = tmp_path / "swapped.csv"
    path.write_text("0F0,0B0\n1B0,1F0\n")
    code, out, err = said("check", path)
    assert (code, out) == (2, "")
    assert "order: rank 1, action 0: 1B0" in err


@pytest.mark.parametrize("flags", [(), ("--lowered",), ("--gather", "step")])
def test_draw_of_what_cannot_run_says_what_check_says(said, tmp_path, flags):
    (tmp_path / "bad.csv").write_text("0F0,0B0\n1B0,1F0\n")
    code, out, err = said("draw", tmp_path / "bad.csv", *flags)
    assert code == 0
    assert out.startswith("rank 0  ")
    assert err.startswith("it is drawn, but it can't run: raypar check says\nschedule 'bad' breaks a rule:\n")
    assert err.partition("\n")[2] == said("check", tmp_path / "bad.csv")[2].removeprefix("raypar: ")
    (tmp_path / "good.csv").write_text("0F0,0B0\n1F0,1B0\n")
    assert said("draw", tmp_path / "good.csv", *flags)[2] == ""


def test_draw_at_real_sizes_says_what_was_left_out_and_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((60, 24)))
    sizes = ["--ranks", "80", "--microbatches", "64"]
    *rows, left_out, _ = paper.draw(["1f1b", *sizes], True).splitlines()
    assert left_out == "(left out: ranks 64 to 79 of 80 and slots 12 to 285 of 286; -o FILE.svg draws all)"
    plain = [re.sub(r"\x1b\[[\d;]+m", "", row) for row in rows]
    assert len(plain) == 64 and max(map(len, plain)) <= 60
    *rows, left_out = paper.draw(["1f1b", "--lowered", "--microbatches", "64"], True).splitlines()
    assert re.fullmatch(r"\(left out: actions 5 to \d+ of \d+; -o FILE.svg draws all\)", left_out)
    assert max(map(len, rows)) <= 60
    for flags, drawn in (([], False), (["--lowered"], True)):
        paper.draw(["1f1b", *flags, "-o", str(tmp_path / "a.svg")], False)
        assert (">SEND<" in (tmp_path / "a.svg").read_text()) == drawn


def test_draw_of_a_deadlock_goes_as_far_as_it_can(said, tmp_path):
    (tmp_path / "stuck.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    code, out, err = said("draw", tmp_path / "stuck.csv")
    assert code == 0 and "deadlock" in err
    assert out.startswith("rank 0  F0\nrank 1     F0\nstuck in slots: ")
    assert "drawn as far as it goes, 2 of 8 actions: schedule 'stuck' does not come to its end: rank 0 at 0B0" in out
    for name in ("a.svg", "a.json", "a.txt"):
        assert said("draw", tmp_path / "stuck.csv", "-o", tmp_path / name)[0] == 0


def test_check_finds_what_blocking_sends_would_do(said):
    code, _, err = said("check", "1f1b", "--blocking")
    assert code == 2
    assert "deadlock: rank" in err
    assert "take --order one_sweep" in err


def test_simulate_measures(said):
    assert said("simulate", "1f1b", "--ranks", 2, "--microbatches", 4)[1:] == (
        "1f1b, 2 ranks, 2 stages, 4 microbatches\n"
        "costs: F 1, B 2, I 1, W 1, link 0\n"
        "1f1b: makespan 15, bubble 20.0%, in flight 2 1\n",
        "",
    )
    code, out, _ = said("simulate", "gpipe", "--b", 1, "--format", "json")
    figures = json.loads(out)
    assert code == 0
    assert figures["makespan"] == 22
    assert figures["bubble"] == pytest.approx(6 / 22)
    assert figures["in_flight"] == [8, 8, 8, 8]
    assert float(json.loads(said("simulate", "gpipe", "--link", 1, "--format", "json")[1])["makespan"]) == 30 + 6 + 3


def test_placements_of_gathers_are_drawn_checked_and_compared(said):
    rows = said("draw", "naive", "--ranks", 1, "--microbatches", 1, "--gather", "microbatch", "--lowered")[1]
    assert " ".join(rows.split()) == "rank 0 0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0RESHARD STEP"
    reduced = said("draw", "naive", "--ranks", 1, "--microbatches", 2, "--reduce", "microbatch", "--lowered")[1]
    assert reduced.count("0REDUCE_GRAD") == 2
    assert "ok: 1f1b" in said("check", "1f1b", "--gather", "step", "--reduce", "step")[1]
    words = ["simulate", "interleaved", "--ranks", 2, "--microbatches", 4, "--gather", "step", "--unshard", 0.5]
    assert said(*words)[1].splitlines() == [
        "interleaved, 2 ranks, 4 stages, 4 microbatches",
        "costs of each of a rank's 2 stages (raypar gallery divides them by 2): F 1, B 2, I 1, W 1, link 0, "
        "UNSHARD 0.5",
        "interleaved: makespan 27.5, bubble 12.7%, in flight 5 3",
        "",
        "                                                         makespan bubble gathers most whole",
        "no --gather                                              27       11.1%  0       2",
        "--gather step                                            27.5     12.7%  2       2",
        "--gather step --resident 1                               29.5     18.6%  11      1",
        "--gather microbatch --reshard-after-forward never        28.5     15.8%  3       2",
        "--gather microbatch --reshard-after-forward except_last  32       25.0%  16      1",
        "--gather microbatch --reshard-after-forward always       35       31.4%  16      1",
    ]
    lines = said(*words, "--units", 8, "--weights-mib", 100, "--activations-mib", 10)[1].splitlines()
    assert [" ".join(line.split()[-3:]) for line in lines[4:]] == [
        "whole peak MiB",
        "0 2 250.0",
        "2 2 250.0",
        "11 1 150.0",
        "3 2 250.0",
        "16 1 130.0",
        "16 1 75.0",
    ]
    figures = json.loads(said(*words, "--format", "json")[1])
    assert [one["gathers"] for one in figures["placements"]] == [0, 2, 11, 3, 16, 16]
    assert json.loads(said("simulate", "1f1b", "--format", "json")[1])["placements"] == []


def test_the_largest_costs_have_finite_figures(said):
    words = [word for name in ("f", "b", "link", "unshard") for word in (f"--{name}", "1e100")]
    code, out, err = said("simulate", "1f1b", *words, "--gather", "microbatch")
    assert (code, err) == (0, "")
    assert "nan" not in out and "inf" not in out.replace("in flight", "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("draw", "1f1b", "--resident", "1"), "--resident 1 bounds what is gathered: add --gather step"),
        (("check", "1f1b", "--reshard-after-forward", "never"), "add --gather microbatch"),
        (("draw", "1f1b", "--gather", "microbatch", "--resident", "2"), "gather once a step, or leave it out"),
        (
            ("simulate", "1f1b", "--unshard", "-1", "--weights-mib", "-2", "--units", "0"),
            "--unshard is -1.0: it must be from 0 to 1e+100\n--weights-mib is -2.0: it must be from 0 to 1e+100\n",
        ),
        (
            ("draw", "pipedream", "--steps", "0"),
            "raypar: schedule 'pipedream' cannot be made: steps=0: an asynchronous sch",
        ),
        (("draw", "1f1f"), "there is no schedule '1f1f': did you mean '1f1b'?"),
        (("draw", "dualpipe", "--microbatches", "7"), "dualpipe takes a multiple of 2: set microbatches to 8"),
        (("draw", "1f1b.svg"), "a file is a table, FILE.csv, or a function, FILE.py:FUNCTION"),
        (("draw", "gone.csv"), "schedule file 'gone.csv' can't be read (No such file or directory)"),
        (("draw", "1f1b", "--ranks", "0", "--microbatches", "0"), "set ranks to 1 or more; microbatches=0"),
        (("draw", "1f1b", "--out", "/no/such/folder/a.svg"), "can't be written"),
        (
            ("draw", "gpipe", "--ranks", "99999", "--microbatches", "99999"),
            "99999 ranks x 99999 microbatches x 1 chunks",
        ),
        (("simulate", "1f1b", "--f", "-1", "--link", "nan"), "--f is -1.0: it must be from 0 to 1e+100\n--link is nan"),
        (("simulate", "1f1b", "--link", "1e308"), "--link is 1e+308: it must be from 0 to 1e+100"),
        (
            ("simulate", "1f1b", "gpipe", "--f", "x", "--gather", "foo", "--b", "--rank", "3", "--link", "-1"),
            "raypar: --f is 'x': it must be a number\n--gather is 'foo': it must be step or microbatch or none\n"
            "--b has no value: give a number\n--rank is no flag: did you mean --ranks?\n"
            "'gpipe' is a word too many: only one SCHEDULE|FILE.csv|FILE.py:FUNCTION is read\n"
            "--link is -1.0: it must be from 0 to 1e+100\n",
        ),
        (
            ("draw", "1f1b", "--lowered", "true", "-o"),
            "--lowered is a switch, and takes no 'true': write --lowered alone",
        ),
        (("draw", "1f1b", "--format", "foo", "-o"), "--format is 'foo': it must be text or svg or csv or json"),
        (("draw", "1f1b", "-o"), "--out has no value: give a path"),
        (("compare", "1f1b", "1f1f", "gone.csv"), "raypar: 2 mistakes:\n- there is no schedule '1f1f': did you mean"),
        (("check",), "a schedule is missing: give raypar check a name, such as 1f1b, or FILE.csv"),
        (("check", "two.csv", "--ranks", "3", "--microbatches", "2"), "has 2 ranks, not 3: leave --ranks out"),
    ],
)
def test_mistakes_on_paper(said, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    Path("two.csv").write_text("0F0,0B0\n1F0,1B0\n")
    code, out, err = said(*words)
    assert (code, out) == (2, "")
    assert says in err


def test_a_failed_run_says_once_how_to_go_on(said, monkeypatch):
    def fails(run, args, schedule, begun, launches, **_):
        launches.append(1.0)
        error = JobError("actor pp=1 died")
        error.add_note("A note of another kind.")
        error.add_note(f"{TO_GO_ON}launch the run again.")
        raise error

    monkeypatch.setattr(commands, "_trained", fails)
    code, _, err = said("train", "gpt-tiny", "--folder", "none")
    assert code == 4
    assert err.splitlines()[-3:] == [
        "raypar: actor pp=1 died",
        "A note of another kind.",
        "nothing was saved: give --folder, and --save-every, to keep checkpoints",
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(15), JobError("Ray does not start")])
@pytest.mark.parametrize("at", ["_checked", "_trained"])
def test_a_resumed_run_that_ends_in_its_launch_says_how_to_go_on(said, monkeypatch, tmp_path, error, at):
    save_at(tmp_path / "a b", 4, run=plain_of(rp.recipe("gpt-tiny", steps=40)))
    monkeypatch.setattr(commands, "_checked", lambda *words: None)
    monkeypatch.setattr(commands, at, raising(type(error)(*error.args)))
    code, _, err = said("train", "--resume", tmp_path / "a b", "--steps", 50)
    told = {KeyboardInterrupt: "interrupted", SystemExit: "terminated", JobError: "Ray does not start"}[type(error)]
    assert code == {KeyboardInterrupt: 130, SystemExit: 143, JobError: 4}[type(error)]
    how = f"resume with: raypar train --resume '{tmp_path}/a b' --steps 50 (after step 4)"
    assert err.splitlines()[-2:] == [f"raypar: {told}", how]


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("folder", ["mine", "none", "auto"])
def test_a_run_that_ends_before_a_checkpoint_says_how_it_begins_anew(said, monkeypatch, tmp_path, launched, folder):
    def pressed(run, args, schedule, begun, launches, **_):
        if run.folder:
            Path(run.folder).mkdir(parents=True, exist_ok=True)
            (Path(run.folder) / "run.toml").touch()
        launches += [1.0] * launched
        error = KeyboardInterrupt()
        error.add_note(f"{TO_GO_ON}launch the run again.")  # the job's, in Python's words
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "_trained", pressed)
    code, _, err = said("train", "gpt-tiny", "--folder", folder)
    anew = f"the same command{' with --overwrite' * (folder == 'mine')} begins anew"
    if not launched:
        ends = f"raypar: interrupted\n{anew}" if folder == "mine" else f"raypar: interrupted: {anew}"
    elif folder == "none":
        ends = "nothing was saved: give --folder, and --save-every, to keep checkpoints"
    else:
        ends = f"nothing was saved: give --save-every to keep checkpoints; {anew}"
    assert code == 130 and err.endswith(f"{ends}\n") and TO_GO_ON not in err


def test_paper_commands_bring_in_neither_torch_nor_ray():
    code = (
        "import sys; from raypar.cli.main import run_command as main\n"
        "for words in ('draw 1f1b', 'check 1f1b', 'simulate 1f1b', 'compare 1f1b gpipe'):\n"
        "    assert main(words.split()) == 0\n"
        "assert not {'torch', 'ray', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_exit_codes_and_streams_of_a_process():
    run = process("draw", "1f1f")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("raypar: there is no schedule '1f1f'")


@pytest.mark.parametrize("words", ["draw 1f1b --microbatches 4000 --format csv", "train --help"])
def test_a_reader_who_goes_away_is_no_error(words):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "raypar.cli.main", *words.split()]
    with subprocess.Popen(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE) as run:
        os.close(writer)
        _, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (0, b"")


def test_a_full_disk_under_standard_output_is_told():
    with open("/dev/full", "w") as full:  # noqa: PTH123
        run = subprocess.run(
            [sys.executable, "-m", "raypar.cli.main", "draw", "1f1b"],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (run.returncode, run.stderr) == (
        4,
        "raypar: standard output can't be written (No space left on device)\n",
    )


# --- runs ------------------------------------------------------------------------------------------------------------


def test_an_interrupted_command_says_how_to_go_on(said, monkeypatch):
    def pressed(words):
        raise KeyboardInterrupt

    monkeypatch.setattr("raypar.cli.main._command", pressed)
    code, _, err = said("train", "gpt-tiny")
    assert (code, err) == (130, "raypar: interrupted: the same command begins anew\n")


def test_a_dry_run_draws_and_starts_nothing(said, data, monkeypatch):
    monkeypatch.setitem(sys.modules, "raypar.job.launch", None)
    code, out, err = said("train", "gpt-tiny", *data, "--schedule", "interleaved", "--dry-run")
    assert code == 0, err
    assert out.startswith("rank 0  0F0 0F1 2F0")
    assert "layers of each stage:  2 2 2 2" in out
    assert out.endswith("no actor was started\nraypar plan shows bytes and seconds, and compares levels of ZeRO\n")
    assert "20 of 4 microbatches x 2 samples x 32 tokens = 256 tokens" in out


def test_a_dry_run_says_what_the_run_needs_and_what_is_here(said, data):
    code, out, err = said("train", "gpt-small", *data, "--mesh.tp", 2, "--model.seq", 32, "--dry-run")
    assert code == 0, err
    rows = dict(line.split(":", 1) for line in out.splitlines() if ":" in line)
    assert rows["actors"].strip() == "4 = pp 2 (recipe gpt-small) x tp 2"
    assert rows["parameters"].strip().startswith("6,451,712; a stage has 3.2 M")
    assert re.match(
        r" +about \d+ MiB: weights 6\.2 MiB, gradients 6\.2 MiB, optimizer 1\d MiB, activat", rows["memory, pp=1"]
    )
    assert re.search(r"GiB of [\d.]+ [GM]iB free here, [\d.]+ [GM]iB for each of 4", rows["memory in all"])


def test_a_dry_run_does_not_say_ok_of_too_much_memory(said, data, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("raypar.planner.resource_needs.free_memory", lambda: 500 << 20)
    code, out, _ = said("train", "gpt-tiny", *data, "--dry-run")
    assert code == 0
    assert "no mistake is in this run, but it needs more than is free here; no actor" in out
    assert "ok:" not in out


def test_a_dry_run_leaves_the_cache_as_it_is(said, tmp_path):
    text, cache = tmp_path / "text", tmp_path / "cache"
    text.write_text("the quick brown fox " * 500)
    words = ("train", "gpt-tiny", "--data.path", text, "--data.cache", cache, "--dry-run")
    code, out, _ = said(*words)
    assert code == 0 and "9,006 tokens to train with" in out and not cache.exists()
    cache.touch()
    code, _, err = said(*words)
    assert code == 2 and f"cache: {str(cache / 'tokens')!r} cannot be written to" in err


def test_a_dry_run_predicts_once(said, data, monkeypatch):
    predicted, predictor = [], summaries.predictor_of

    def counted(run):
        predict = predictor(run)
        return lambda sized: predicted.append(sized.run) or predict(sized)

    monkeypatch.setattr(summaries, "predictor_of", counted)
    monkeypatch.setattr(summaries, "before_run", lambda sized: counted(sized.run)(sized))
    assert said("train", "gpt-tiny", *data, "--dry-run")[0] == 0
    assert predicted.count(predicted[0]) == 1, "others are the runs that an advice is about"


def test_a_dry_run_takes_no_time_and_no_torch():
    """Seconds of the CPU, since those of the clock are longer on a busy machine."""
    for name in ("gpt-124m", "llama-small"):
        code = (
            "import sys, time; from raypar.cli.main import run_command as main\n"
            f"assert main(['train', {name!r}, '--model.vocab', '300', '--dry-run']) == 0\n"
            "assert not {'torch', 'ray'} & set(sys.modules)\nprint(time.process_time())"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        assert float(run.stdout.splitlines()[-1]) < 4.0  # 0.9 to 1.2 on a slow machine, 2.3 on a slow and busy one


@pytest.mark.parametrize("command", ["train", "verify", "step"])
def test_too_many_actors_are_refused_before_ray_starts(said, data, monkeypatch, command):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("raypar.actors.machine.this_machine.num_cores", lambda: 2)
    monkeypatch.setitem(sys.modules, "raypar.job.launch", None)
    code, _, err = said(command, "gpt-tiny", *data, "--mesh.dp", 10)
    assert code == 2
    fix = "use a smaller mesh, or set RAY_ADDRESS to a cluster"
    product = "(pp 2 (recipe gpt-tiny) x dp 10)"
    assert f"mesh: 20 actors {product} are more than the 16 that this machine of 2 cores takes: {fix}" in err
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert said("train", "gpt-tiny", *data, "--mesh.pp", 4, "--mesh.dp", 5, "--dry-run")[0] == 0


LONG = "a" * 300


@pytest.mark.parametrize(
    "words",
    [
        ("train", "gpt-tiny", "--folder", LONG, "--dry-run"),
        ("train", "gpt-tiny", "--trace", LONG, "--dry-run"),
        ("train", "--resume", LONG),
        ("train", "gpt-tiny", "--model.hf", LONG),
        ("report", LONG),
        ("eval", LONG),
        ("generate", LONG, "the"),
        ("chat", LONG),
        ("ckpt", "export", LONG, "to"),
        ("ckpt", "verify", LONG),
        ("check", f"{LONG}.csv"),
        ("data", "show", LONG),
    ],
    ids=lambda words: " ".join(words).replace(LONG, "LONG"),
)
def test_a_name_that_no_file_can_have_is_a_mistake(said, words):
    code, _, err = said(*words)
    assert code == 2 and "Traceback" not in err
    assert "too long" in err or "100 letters" in err or "no such" in err or "There is no" in err or "is no" in err, err


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (
            ("--mesh.rank-dp", 2, 1),
            "--mesh.rank-dp is (2, 1), for 3 pipeline ranks (mesh.pp): give one number for each",
        ),
        (
            ("--mesh.rank-dp", 1, 2, 1, "--microbatches", 1),
            "--microbatches is 1, but mesh.rank_dp is (1, 2, 1), and as many replicas take a step's microbatches in "
            "turn: set it to 2, or to another multiple of 2",
        ),
    ],
)
def test_replicas_by_rank_that_do_not_fit_are_one_fault(said, words, first):
    code, _, err = said("train", "gpt-tiny", "--mesh.pp", 3, *words, "--dry-run")
    assert code == 2
    assert "a mistake, no step was taken" in err
    assert err.splitlines()[-1].startswith(first)


def test_recipes_are_listed_with_their_sizes(said):
    code, out, _ = said("recipes")
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert {"gpt-tiny", "gpt-small", "gpt-124m", "llama-tiny", "llama-small"} <= set(lines)
    assert re.search(r"124\.4 M +12 x 768 +65,536 +2,000 +4 = pp 4 +a run of GPT-2 small's size$", lines["gpt-124m"])
    assert said("recipes", "gpt-tiny")[0] == 2


def test_a_run_is_what_recipe_file_and_flags_say(monkeypatch, data, tmp_path, said):
    seen = []
    monkeypatch.setattr(
        commands, "check_launch", lambda run, resumed, **_: seen.append(run) or {"train": lower(build("1f1b", 2, 4))}
    )
    path = tmp_path / "run.toml"
    path.write_text('recipe = "gpt-tiny"\nsteps = 7\nseed = 3\n[model]\nlayers = 12\n[optim]\nkind = "sgd"\n')
    said("train", "--steps", 5, "--split", 3, 9, "--dry-run", "--clip", "None", path)
    said("train", path, "--optim.momentum", 0.5, "--model.tied", "--dry-run")
    said("train", "gpt-tiny", "--optim.kind=sgd", "--mesh.pp", 4, "--bucket-mb", 0.1, "--clip", "none", "--dry-run")
    said("train", path, "--model.kind", "llama", "--model.kv-heads", 2, "--optim.kind", "adamw", "--dry-run")
    said(
        "train",
        "llama-tiny",
        "--model.positions",
        "alibi",
        "--model.ffn",
        90,
        "--zero=none",
        "--recompute=none",
        "--dry-run",
    )
    groups = ("--optim.no-decay", "*.bias", "embed.*", "--optim.rates", "embed.*", 0.1, "head.*", 2)
    said("train", "gpt-tiny", "--optim.kind", "muon", "--optim.decay", "wsd", *groups, "--dry-run")
    first, second, third, fourth, fifth, sixth = seen
    assert (first.steps, first.seed, first.split, first.clip) == (5, 3, (3, 9), None)
    assert (first.model.layers, first.model.hidden, first.optim.kind) == (12, 32, "sgd")
    assert (second.steps, second.optim.momentum, second.model.tied) == (7, 0.5, True)
    assert (third.optim.lr, third.optim.warmup, third.optim.decay, third.mesh.pp) == (0.01, 2, "cosine", 4)
    assert (second.bucket_mb, third.bucket_mb) == (4.0, 0.1)
    assert (second.clip, third.clip, fifth.zero, fifth.recompute) == (1.0, None, None, "none")
    assert fourth.model == Llama(layers=12, hidden=32, heads=4, kv_heads=2, seq=32, dropout=0.1)
    assert fifth.model == replace(recipe("llama-tiny").model, positions="alibi", ffn=90)
    rates = {"embed.*": 0.1, "head.*": 2.0}
    assert sixth.optim == Muon(warmup=2, decay="wsd", no_decay=("*.bias", "embed.*"), rates=rates)
    assert type(first).__name__ == "Run"


def test_all_mistakes_in_a_run_are_listed(said, tmp_path):
    code, out, err = said(
        "train", "gpt-tiny", "--mesh.pp", 9, "--mesh.cp", 0, "--steps", 0, "--optim.lr", "nan", "--model.heads", 5,
        "--schedule", "1f1b", "--data.path", tmp_path / "gone", "--log", tmp_path / "no" / "log.jsonl",
    )  # fmt: skip
    assert (code, out) == (2, "")
    for says in (
        "7 mistakes, no step was taken", "9 stages for 8 layers", "mesh.cp is 0", "steps is 0", "optim.lr is nan",
        "set model.heads to 4", f"data.path: '{tmp_path / 'gone'}' cannot", "there is no folder",
    ):  # fmt: skip
        assert says in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("gpt-tny",),
            "did you mean 'gpt-tiny'? known are gpt-tiny, gpt-small, gpt-124m, "
            "llama-tiny, llama-small, moe-tiny, moe-small; or give a file",
        ),
        (("gone.toml",), "'gone.toml' can't be read"),
        (("--steps", "3", "gone.toml"), "'gone.toml' can't be read"),
        (("--model.kind", "bert"), "model.kind is 'bert': use 'gpt' or 'llama'"),
        (("llama-tiny", "--model.kv-heads", "3"), "--model.kv-heads 3 does not divide model.heads 4: set"),
        (("--model.kind", "llama", "--model.mlp", "3"), "--model.mlp: Llama has no field 'mlp': it has ffn"),
        (("gpt-tiny", "--optim.momentum=.9"), "--optim.momentum: AdamW has no field 'momentum': SGD and Muon have one"),
        (
            ("--steps", "ten", "--mesh.pp=two", "--zero", "9", "--optim.lr", "fast", "--clip", "none"),
            "4 mistakes, no step was taken:\n- --steps is 'ten': it must be a whole number\n- --mesh.pp is 'two'",
        ),
        (("gpt-tiny", "--wait-for-nodes", "nan"), "--wait-for-nodes is nan: it must be a number of seconds, 0 or more"),
        (("gpt-tiny", "--auto-microbatch", "--room", "-1"), "--room is -1.0: it must be a number of GiB"),
        (("gpt-tiny", "--room", "3"), "--room is for --auto-microbatch: give that as well, or leave it out"),
        (("gpt-tiny", "--schedule", "zb-h3"), "did you mean 'zb-h1' or 'zb-h2' or 'zb-v'?"),
        (("gpt-tiny", "--mesh.ep", "2"), "2 mistakes, no step was taken:\n- --mesh.ep is 2"),
        (("--optim.kind", "adam"), "optim.kind is 'adam': use 'adamw' or 'sgd' or 'muon'"),
        (("gpt-tiny", "--log", "."), "--log '.' is a folder"),
        (("gpt-tiny", "--trace", "."), "--trace '.' is a folder"),
        (("gpt-tiny", "--trace", "no/such/trace.json"), "--trace 'no/such/trace.json': there is no folder 'no/such'"),
        (("gpt-tiny", "--servers", "2"), "servers is 2, but data_parallel is 'all_reduce'"),
    ],
)
def test_mistakes_of_a_run(said, words, says):
    code, out, err = said("train", *words)
    assert (code, out) == (2, "")
    assert says in err


def raising(error):
    def call(*words, **flags):
        raise error

    return call


def test_a_run_whose_weights_are_lost_is_summed_up_and_failed(said, monkeypatch):
    finished = commands.Finished([("steps", "4")], "its weights after step 4 are not saved")
    monkeypatch.setattr(commands, "train", lambda *words, **flags: finished)
    code, out, err = said("train")
    assert (code, err) == (4, "raypar: its weights after step 4 are not saved\n")
    assert out.split() == ["steps:", "4"]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            JobError("actor pp=1: action 1F0 failed: boom\nTraceback (most recent call last):\n"),
            4,
            "actor pp=1: action 1F0 failed: boom",
        ),
        (NonFiniteError("the gradients of step 3 are not finite"), 6, "the gradients of step 3 are not finite"),
        (KeyboardInterrupt(), 130, "interrupted: the same command begins anew"),
    ],
)
@pytest.mark.parametrize("command", ["train", "verify"])
def test_how_a_run_can_fail(said, monkeypatch, error, code, line, command):
    where, name = (short_runs, "run_verify") if command == "verify" else (commands, command)
    monkeypatch.setattr(where, name, raising(error))
    found, out, err = said(command)
    assert (found, out) == (code, "")
    assert err.strip() == f"raypar: {line}"


def test_ctrl_c_on_paper(said, monkeypatch):
    monkeypatch.setattr(paper, "draw", raising(KeyboardInterrupt()))
    assert said("draw", "1f1b")[0] == 130


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError(), Exception("no port\nhint")])
def test_a_ray_that_does_not_start_is_a_failed_run(said, monkeypatch, data, error):
    cluster = importlib.import_module("raypar.cluster.lifecycle.ray_cluster")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster.ray, "init", raising(error))
    code, out, err = said("train", "gpt-tiny", *data)
    assert (code, out) == (4, "")
    assert err.splitlines()[-1].startswith("raypar: Ray does not start on this machine (")
    assert "set RAY_gcs_server_port_wait_time_s to more than the 90 s of now" in err
    assert "Traceback" not in err


def test_a_ray_that_is_late_is_started_again(said, monkeypatch, data):
    cluster = importlib.import_module("raypar.cluster.lifecycle.ray_cluster")
    starts = []

    def late(**settings):
        starts.append(settings)
        raise RuntimeError("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster.ray, "init", late)
    code, _, err = said("train", "gpt-tiny", *data)
    assert (code, len(starts)) == (4, 3)
    assert err.count("Ray was not up in time on this machine (load ") == 2, err
    assert "try again when the machine is less busy (load " in err.splitlines()[-1]


@pytest.mark.long
def test_sigterm_saves_a_run_and_ends_its_actors(cluster, data, tmp_path):
    """On the tests' own Ray; what a program does to one that it has started is in job/test_faults.py."""
    before = cluster.util.list_named_actors(all_namespaces=True)
    path = tmp_path / "log.jsonl"
    words = ["train", "gpt-tiny", *data, "--steps", "1000000", "--mesh.pp", "1", "--log", str(path)]
    words += ["--folder", str(tmp_path / "run")]
    environment = os.environ | {"RAY_ADDRESS": cluster.get_runtime_context().gcs_address}
    command = [sys.executable, "-m", "raypar.cli.main", *words]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as run:
        while run.poll() is None and not (path.exists() and path.read_text()):
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        _, err = run.communicate(timeout=60)
    assert run.returncode == 143, err
    assert err.splitlines()[-2] == "raypar: terminated"
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert f"saved as {saved.name}\n" in err
    assert re.fullmatch(r"resume with: raypar train --resume .*/run \(after step \d+\)", err.splitlines()[-1])
    assert "Traceback" not in err
    end = time.monotonic() + 10
    while (left := cluster.util.list_named_actors(all_namespaces=True)) != before and time.monotonic() < end:
        time.sleep(0.1)
    assert left == before


def test_sigterm_is_one_whatever_ray_makes_of_it(said, monkeypatch):
    def waits(command, words):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit:
            sys.exit(1)  # so ray.get does

    monkeypatch.setattr(cli, "_run", waits)
    before = signal.getsignal(signal.SIGTERM)
    assert said("train", "gpt-tiny") == (143, "", "raypar: terminated: the same command begins anew\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_was_muted_for_a_command_is_heard_after_it(caplog):
    log = logging.getLogger("raypar.job.start.resume")
    with cli._messages(logging.ERROR):
        log.warning("within")
    log.warning("after")
    assert caplog.messages == ["after"]


def test_a_run_is_logged_and_summed_up(said, kept_actors, data, tmp_path):
    path = tmp_path / "log.jsonl"
    code, out, err = said("train", "gpt-tiny", *data, "--steps", 3, "--eval-every", 2, "--log", path)
    assert code == 0, err
    assert "mesh.pp is 2, from recipe gpt-tiny\n" in err
    assert [line for line in err.splitlines() if line.startswith("actors: ")] == ["actors: 2 = pp 2"]
    assert [line.split()[1] for line in err.splitlines() if line.startswith("step ")] == ["1/3", "2/3", "3/3"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps, evaluations = [x for x in lines if "loss" in x], [x for x in lines if "val_loss" in x]
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert [line["step"] for line in evaluations] == [2, 3]
    assert all({"loss", "tokens", "tokens_per_s", "step_ms", "grad_norm"} <= set(line) for line in steps)
    assert [line["tokens"] for line in steps] == [256] * 3
    summary = dict(line.split(": ", 1) for line in out.splitlines())
    assert summary["train loss"].strip() == f"{steps[-1]['loss']:.4f}"
    assert summary["validation loss"].strip() == f"{evaluations[-1]['val_loss']:.4f}"
    assert summary["activations in flight"].strip() == "2 1 measured, 2 1 predicted"
    assert "32.3% predicted from FLOPs and bytes" in summary["bubble"]
    assert summary["log"].strip() == str(path)


def test_a_run_that_changes_no_weight_has_failed(said, kept_actors, data):
    scale = ("--precision", "fp16", "--loss-scale.init", 9e37)
    code, out, err = said("train", "gpt-tiny", *data, "--steps", 2, *scale)
    assert code == 4, err
    assert (
        "none of the 2 steps has changed a weight: each overflowed in fp16: lower loss_scale.init 9e+37 (4.5e+37" in err
    )
    assert err.splitlines()[-1] == "raypar: the run has changed no weight (see above)"
    assert "of which 2 skipped" in out


@pytest.mark.long
def test_a_run_of_replicas_and_servers_is_traced(said, kept_actors, data, tmp_path):
    path, log = tmp_path / "step.json", tmp_path / "log.jsonl"
    path.write_text("of another run")
    code, out, err = said(
        "train", "gpt-tiny", *data, "--steps", 2, "--mesh.pp", 1, "--mesh.dp", 2, "--data-parallel", "parameter_server",
        "--trace", path, "--log", log, "--folder", "none",
    )  # fmt: skip
    assert code == 0, err
    summary = dict(line.split(": ", 1) for line in out.splitlines())
    assert "reduction hidden" not in summary, "with servers the weights are waited for too"
    assert summary["trace"].strip() == str(path)
    assert sorted(tmp_path.iterdir()) == [log, path], "nothing is left beside it"
    events = json.loads(path.read_text())["traceEvents"]
    named = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {"pp=0 dp=0", "pp=0 dp=1", "server 0 of pp=0"}
    assert [json.loads(line)["overlap"] for line in log.read_text().splitlines()[:2]] == [None, None]


def test_a_failed_run_leaves_the_old_trace(said, monkeypatch, data, tmp_path):
    start = importlib.import_module("raypar.job.launch")
    monkeypatch.setattr(start, "launch_in", raising(JobError("enough")))
    path = tmp_path / "step.json"
    path.write_text("of another run")
    assert said("train", "gpt-tiny", *data, "--trace", path, "--folder", "none")[0] == 4
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("step.json", "of another run")]


def test_a_dry_run_counts_replicas_and_servers(said, data):
    words = ("--mesh.dp", 3, "--data-parallel", "parameter_server", "--servers", 2, "--dry-run")
    code, out, err = said("train", "gpt-tiny", *data, *words)
    assert code == 0, err
    assert "20 of 3 replicas x 4 microbatches x 2 samples x 32 tokens = 768 tokens" in out
    assert "parameter servers:     2 for each of 2 pipeline ranks" in out


def test_verify_compares_with_one_process(said, kept_actors, data):
    code, out, err = said("verify", *data, "--steps", 2)
    assert (code, out) == (
        0,
        "bitwise equal: 2 losses and gradient norms, 109 gradients of step 1 and 109 weights after 2 steps\n",
    ), err


def test_verify_tells_the_first_difference(said, monkeypatch):
    found = Verdict(
        2, 9, 9, (1.0, 2.0), (Difference("weight blocks.0.mlp", 1e-7), Difference("weight x", 1e-6, allowed=1e-5))
    )
    monkeypatch.setattr(short_runs, "run_verify", lambda words: found)
    code, out, _ = said("verify")
    assert code == 1
    assert "1 differences in 2 losses and gradient norms, 9 gradients of step 1 and 9 weights after 2 steps; " in out
    assert "first: weight blocks.0.mlp differs by 1e-07 of its norm; worst 1e-06" in out
    close = Verdict(2, 9, 9, (1.0, 2.0), found.differences[1:], bounds=Bounds(1e-6, 2e-5, 1e-3))
    assert "\nbounds: losses 1e-06, gradients 2e-05, weights 0.001, wider because AdamW divides a gradient" in str(
        close
    )
    assert close.ok
    assert str(close).endswith("largest differences, of the tensor's norm: weight x 1e-06 (bound 1e-05)")
    assert not Verdict(2, 9, 9, (1.0, 2.0), (Difference("loss", float("nan"), allowed=1e-6),)).ok


def test_verify_takes_five_steps_unless_told(said, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(
        short_runs, "check_launch", lambda run, **_: seen.append(run.steps) or raising(JobError("enough"))()
    )
    path = tmp_path / "run.toml"
    path.write_text('recipe = "gpt-tiny"')
    (tmp_path / "seven.toml").write_text("steps = 7")
    for words in ((), ("--steps", 3), ("gpt-small",), (path,), (tmp_path / "seven.toml",)):
        assert said("verify", *words)[0] == 4
    assert seen == [5, 3, 5, 5, 7]


def test_verify_takes_the_run_of_a_run_folder_but_not_its_length(tmp_path):
    (tmp_path / "run.toml").write_text(toml_of(plain_of(replace(recipe("gpt-tiny"), steps=70, seed=11))))
    run, wrong = _base(str(tmp_path), {"steps": 2})
    assert (run.seed, run.steps, wrong) == (11, 2, [])


@pytest.mark.parametrize(
    "words",
    [
        ("report", "{}"),
        ("ckpt", "verify", "{}"),
        ("draw", "{}"),
        ("train", "gpt-tiny", "--{}", "3"),
        ("gallery", "--out", "{}.html"),
        ("train", "gpt-tiny", "--steps", "0", "--folder", "{}"),
    ],
    ids=lambda words: words[0],
)
def test_commands_to_a_terminal_in_a_name_are_spelled(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "a\x1b[31mb\rc"
    code, out, err = said(*(word.format(name) for word in words))
    assert not {"\x1b", "\r"} & {*out, *err}
    assert r"a\x1b[31mb\rc" in out + err or not code
    assert cli.printable("tab\tline\nbell\x07 \x9b") == "tab\tline\nbell\\x07 \\x9b"
