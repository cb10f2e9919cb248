"""What a terminal shows of a run, at any width: a stand-in takes the job's part, and no actor is started."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.run import Run
from raypar.cli import main as cli
from raypar.config.run import check_run
from raypar.errors import JobError
from raypar.log_details import DETAIL
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.progress import display, launching, on_screen
from raypar.reporting.report import Report
from raypar.reporting.screen import STYLES, PathFigure, ScreenHandler, console_of, show_rows, show_text
from raypar.reporting.summary import brief_head, log_plan
from raypar.reporting.tables.memory_table import Figure, MemoryTable
from tests.support.panes import pane, shown

STEPS = 1_200
LONG = "saved as step-00000600, from memory, which took 1,551 ms, as [red]names[/red] may have markup in them"
KINDS = ("weights", "gradients", "optimizer", "activations", "process", "peak")
MEMORY = (558 << 20, 515 << 20)


class Job:
    """What ``raypar train`` asks of a job."""

    failures, lost = (), None

    def __init__(self, run):
        self.run, self.saved = run, Path(run.folder) / "checkpoints" / "step-00001200"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def overlay(self):
        return None

    def evaluate(self, ema=False):
        return Evaluation(self.run.steps, 2.5, 64, 0.5)

    def train(self, on, ahead):
        reports = []
        with display(self.run, self.run.steps) as show:
            for step in (0, 599, 1199):
                reports.append(Report(step, 2.53591, 0.12345, 1e-3, 256, 1551.4, 1500.0, 0.147, None, (2, 1), MEMORY))
                show(reports[-1])
            show(Evaluation(600, 2.5, 64, 0.5))
            logging.getLogger("raypar").info(LONG)
        return reports


def launch_in(run, waits, resume, **_):
    """Instead of a launch: what it logs."""
    with on_screen():
        log_plan(run, check_run(run)["train"], Skeleton(run.model, run.seed))
    with launching(2):
        logging.getLogger("raypar").info("starting 2 actors", extra=DETAIL)
    return Job(run)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question\n" * 200)
    return ["--data.path", str(tmp_path / "a.txt"), "--data.cache", str(tmp_path / "cache")]


@pytest.fixture
def trained(text, tmp_path, monkeypatch):
    """Train with the stand-in on a terminal; returns what was printed."""

    def train(columns, *words, **environment):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("raypar.job.launch.launch_in", launch_in)
        with pane(monkeypatch, columns, **environment) as printed:
            code = cli.run_command(["train", "gpt-tiny", *text, "--steps", str(STEPS), *words])
        assert code == 0, printed()
        return printed()

    return train


def broken(printed, columns):
    """Lines that a pane can't show whole, but for those of one word, such as a path."""
    return [line for line in shown(printed, 10_000) if len(line) > columns and " " in line.strip()]


@pytest.mark.parametrize("columns", [60, 80, 100, 120])
def test_a_run_on_a_terminal(trained, columns):
    printed = trained(columns)
    lines = shown(printed, columns)
    head = lines[: next(at for at, line in enumerate(lines) if line.startswith("after step"))]
    assert head[0] == "converting the text to tokens, once"
    assert [line.split(":")[0] for line in head[1:]] == ["run folder", "actors", "steps", "memory"]
    assert "starting 2 actors" in printed and "starting 2 actors" not in "\n".join(lines)
    folder = head[1].removeprefix("run folder: ")
    assert lines[-2:] == [f"next: raypar report {folder}", ""]
    assert any(line.split()[-1:] == [f"{folder}/checkpoints/step-00001200"] for line in lines)
    assert not broken(printed, columns)
    assert "1,551 ms" in "\n".join(lines) and "[red]names[/red]" in " ".join(" ".join(lines).split())
    bars = re.findall(r"step +\d+/1200[^\r\n]*", re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", printed))
    assert bars[0].startswith("step    0/1200") and bars[-1].startswith("step 1200/1200")
    for bar in bars:
        assert re.search(r"(-:--:--|\d:\d\d:\d\d) left", bar) and len(bar) <= columns
    parts = {60: "tokens/s", 80: "━", 100: "grad", 120: "GiB"}
    for at, part in parts.items():
        assert (part in bars[-1]) == (columns >= at), bars[-1]


def test_an_error_in_a_step_takes_the_bar_away_and_its_notes_follow_it(text, tmp_path, monkeypatch):
    def train(job, on, ahead):
        with display(job.run, job.run.steps) as show:
            show(Report(0, 2.5, 0.1, 1e-3, 256, 1551.4, 1500.0, 0.147, None, (2, 1), MEMORY))
            error = JobError("actor pp=1 died during step 2")
            logging.getLogger("raypar").error("%s", error)
            raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("raypar.job.launch.launch_in", launch_in)
    monkeypatch.setattr(Job, "train", train)
    with pane(monkeypatch, 80) as printed:
        assert cli.run_command(["train", "gpt-tiny", *text, "--steps", str(STEPS)]) == cli.FAILED
    assert "step    1/1200" in printed()
    lines = [line for line in shown(printed(), 80) if line]
    at = lines.index("raypar: actor pp=1 died during step 2")
    assert lines[at + 1].startswith("nothing was saved: give ") and len(lines) <= at + 3
    assert not any(line.startswith("step  ") for line in lines)


@pytest.mark.parametrize("columns", [20, 40])
def test_a_small_terminal_has_the_step_and_the_time_left(trained, columns):
    printed = trained(columns)
    lines = shown(printed, columns)
    assert any(re.search(r"1200/1200 .*0:00:00", line) for line in lines), lines
    assert all(line.startswith("next: raypar report runs/") for line in broken(printed, columns))


def test_a_terminal_without_colours_cursor_or_letters(trained):
    assert "\x1b[38" in trained(80)
    assert "\x1b[38" not in trained(80, NO_COLOR="1")
    assert "\x1b[38" not in trained(80, TERM="xterm"), "what 16 colours look like is up to the terminal"
    dumb = trained(40, TERM="dumb")
    assert (
        "\x1b" not in dumb
        and dumb.count("starting 2 actors") == 1
        and re.search(r"step 1200/1200 .*0:00:00 left", re.sub(r"\s+", " ", dumb))
    )
    plain = trained(80, encoding="ascii")
    assert "####" in plain and "\\u" not in plain


def test_all_of_the_head_with_v(trained):
    lines = shown(trained(200, "-v"), 200)
    for start in ("mesh.pp is 2, from recipe", "layers of each stage: ", "memory, pp=1: ", "starting 2 actors"):
        assert any(line.startswith(start) for line in lines), start


def test_short_forms_are_for_terminals_alone(trained, text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("raypar.job.launch.launch_in", launch_in)
    assert cli.run_command(["train", "gpt-tiny", *text, "--steps", str(STEPS)]) == 0
    out, err = capsys.readouterr()
    assert "memory, pp=1: about" in err and "\nmemory: " not in err and "\x1b" not in out + err
    assert out.splitlines()[-1].startswith("next: raypar report runs/")


def test_the_head_of_a_run_that_goes_on_says_so():
    rows = [("actors", "1"), ("parameters", "9 frozen; b"), ("steps", "8 of 4 microbatches; it goes on after step 4")]
    rows += [("memory in all", "about 1 MiB on CPUs"), ("bubble", "0.0% predicted from FLOPs")]
    assert [*brief_head(rows).values()] == [
        "actors: 1; 9 frozen parameters",
        "steps: 8 of 4 microbatches; it goes on after step 4",
        "memory: about 1 MiB on CPUs; bubble 0.0%",
    ]


# --- any text --------------------------------------------------------------------------------------------------------

DOCTOR = (
    "wrong  network   the address 10.0.0.2 of this node took 1,551 ms to answer, and 19.5 GiB are free: wait for it"
)


@pytest.mark.parametrize("columns", [20, 40, 60, 80])
def test_lines_end_between_words(monkeypatch, columns):
    path = "/tmp/" + "a long folder/" * 9
    with pane(monkeypatch, columns) as printed:
        console = console_of(sys.stdout)
        show_text(console, f"{DOCTOR}\nmend it: raypar train --resume runs/a")
        show_rows(console, [("memory, pp=0", DOCTOR), ("kept in", PathFigure(path))])
    plain = re.sub(r"\x1b\[[\d;]*m", "", printed()).replace("\r", "")
    assert path in plain, "it can be copied"
    lines = plain.replace(path, "").split("\n")
    assert all(len(line) <= columns or line.strip() == "raypar train --resume runs/a" for line in lines)
    assert " ".join(plain.split()).count(DOCTOR.split("   ")[1]) == 2, "no word is lost"
    assert "1,551 ms" in plain and "19.5 GiB" in plain and "raypar train --resume runs/a" in plain
    assert re.search(r"\x1b\[38;5;131mwrong", printed())


def test_rows_whose_last_columns_do_not_fit_are_divided_there(monkeypatch):
    with pane(monkeypatch, 40) as printed:
        show_text(console_of(sys.stdout), "naive, auto  96.5  75.0%  the same with halves\n  a b  c\n1  2  3")
    assert shown(printed(), 40)[:4] == [
        "naive, auto  96.5  75.0%",
        " " * 19 + "the same with halves",
        "  a b  c",
        "1  2  3",
    ]


PICTURES = {
    "draw 1f1b --ranks 16 --microbatches 64": "FILE.svg draws all)",
    "draw dead.csv": "(check says more)",
    "train gpt-tiny --dry-run --microbatches 64": "FILE.svg draws all)",
}


@pytest.mark.parametrize("columns", [20, 60, 80, 100, 120])
@pytest.mark.parametrize("words", PICTURES)
def test_a_picture_is_cut_to_its_terminal_and_the_sentences_below_it_are_wrapped(
    monkeypatch, tmp_path, text, words, columns
):
    (tmp_path / "dead.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    monkeypatch.chdir(tmp_path)
    with pane(monkeypatch, columns) as printed:
        assert cli.run_command([*words.split(), *(text if "train" in words else [])]) == 0
    plain = re.sub(r"\x1b\[[\d;]*m", "", printed())
    assert PICTURES[words] in " ".join(plain.split())
    assert not broken(plain, columns)


TEXTS = [
    "recipes",
    "plan gpt-small --gpus 8",
    "check zb-v",
    "simulate zb-v --gather step",
    "gallery",
    "compare 1f1b zb-h1",
    "compare",
    "report none",
    "ckpt ls none",
    "data show none",
    "train gpt-tiny --steps x --mesh.pp 0 --no-flag 1",
    "train job.toml",
    "eval none",
    "sft none --model none",
]


@pytest.mark.parametrize("columns", [60, 80, 100, 120])
def test_what_commands_print_fits_a_terminal(monkeypatch, tmp_path, columns):
    (tmp_path / "job.toml").write_text('recipe = "gpt-tiny"\nmoe = 1\n[data]\npath = "none"\n')
    monkeypatch.chdir(tmp_path)
    for words in TEXTS:
        with pane(monkeypatch, columns) as printed:
            cli.run_command(words.split())
        monkeypatch.chdir(tmp_path)
        plain = re.sub(r"\x1b\[[\d;]*m", "", printed())
        assert plain and not broken(plain, columns), words


def test_verify_says_on_which_actors_a_run_is_compared(monkeypatch):
    monkeypatch.setattr("raypar.verify", lambda run: None, raising=False)
    with pane(monkeypatch, 80) as printed:
        assert cli.run_command(["verify", "gpt-tiny"]) == cli.OK
    assert "5 steps in this process, then on actors: 2 = pp 2; 1f1b of 4 microbatches" in printed()


NAME = "x[bold]y\x1b[31mz<script>"
NAMED = [
    ["train", NAME],
    ["train", "gpt-tiny", "--folder", NAME],
    ["train", f"{NAME}.toml"],
    ["plan", f"{NAME}.toml"],
    ["plan", "gpt-tiny", "--schedule", NAME],
    ["draw", f"{NAME}.csv"],
    ["draw", f"{NAME}.csv", "-o", f"{NAME}.svg"],
    ["check", f"{NAME}.csv"],
    ["compare", "1f1b", f"{NAME}.csv"],
    ["report", NAME],
    ["doctor", NAME],
    ["ckpt", "ls", NAME],
    [NAME],
]


@pytest.mark.parametrize("environment", [{}, {"TERM": "dumb"}, {"NO_COLOR": "1"}, {"encoding": "ascii"}])
def test_names_with_markup_are_printed_as_they_are_and_control_characters_spelled(monkeypatch, tmp_path, environment):
    (tmp_path / f"{NAME}.csv").write_text("0F0,0B0\n")
    (tmp_path / f"{NAME}.toml").write_text('"[bold]y\\u001b[31mz<script>" = 1\n')
    for words in NAMED:
        monkeypatch.chdir(tmp_path)
        with pane(monkeypatch, 200, **environment) as printed:
            cli.run_command(words)
        assert r"[bold]y\x1b[31mz<script>" in printed(), words
        assert "\x1b[31m" not in printed(), words


def test_log_lines_of_a_script_and_the_bar_spell_control_characters(monkeypatch):
    with pane(monkeypatch, 80) as printed:
        with display(Run(steps=2), 2) as show:
            show(Evaluation(1, 2.5, 64, 0.5, metrics={NAME: 1.0}))
        ScreenHandler().handle(logging.makeLogRecord({"msg": NAME}))
        ScreenHandler().handle(logging.makeLogRecord({"msg": "long", "brief": NAME}))
    assert printed().count(r"[bold]y\x1b[31mz<script>") == 3 and "\x1b[31m" not in printed()


def test_json_and_control_characters(monkeypatch):
    with pane(monkeypatch, 40) as printed:
        cli._say('{"a": "' + "b " * 60 + '"}')
        cli._say("ok: \x1b[2J")
        cli._say("\x1b[31mred\x1b[0m", styled=True)
    assert "b " * 60 in printed() and r"\x1b[2J" in printed() and "\x1b[31mred" in printed()
    with pane(monkeypatch, 40, NO_COLOR="1") as printed:
        cli._say("\x1b[31mred\x1b[0m", styled=True)
    assert printed() == "red\r\n"


def luminance(number):
    """Of one of the 256 colours, as WCAG defines it."""
    levels = (0, 95, 135, 175, 215, 255)
    cube = [levels[(number - 16) // step % 6] for step in (36, 6, 1)]
    parts = [8 + 10 * (number - 232)] * 3 if number >= 232 else cube
    linear = [(part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4) for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_contrast_with_black_and_with_white():
    for style in STYLES.values():
        light = luminance(int(re.fullmatch(r"color\((\d+)\)", style)[1])) + 0.05
        assert min(1.05 / light, light / 0.05) >= 4.5, style


def test_a_table_of_memory_fits_its_terminal(monkeypatch):
    table = MemoryTable({f"pp={rank}": {kind: Figure(1 << 30, 1 << 20) for kind in KINDS} for rank in range(2)})
    assert len(repr(table).splitlines()) == 3, "in a file an actor is a line"
    for columns in (60, 80):
        with pane(monkeypatch, columns) as printed:
            sys.stdout.write(f"{table!r}\n")
        rows = printed().splitlines()
        assert all(len(row) <= columns for row in rows)
        assert sum(row.startswith("pp=1 ") for row in rows) == len(rows) // 3 > 1
        assert printed().count("1.0 GiB / 1 MiB") == 2 * len(KINDS)


def test_a_letter_that_the_output_can_not_have_is_spelled(tmp_path):
    (tmp_path / "schön.csv").write_text("0F0,0B0\n")
    words = [sys.executable, "-m", "raypar", "check", str(tmp_path / "schön.csv")]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert (done.returncode, done.stderr) == (0, "") and r"sch\xf6n" in done.stdout


def test_a_page_is_made_where_the_system_has_no_utf8():
    code = "from raypar.reporting.html.markup import script; assert script()"
    without = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **without}
    )
    assert (done.returncode, done.stderr) == (0, "")
