"""Hostile and clumsy runs: each has to be a plan, or mistakes that are listed.

    python -m tests.long.config_fuzz [--cases 20000] [--first 0]

A case is made of its number alone: a recipe with odd values in some fields as Python has them, the same as a TOML file,
or as words of ``raypar train --dry-run``; or a run that is right but for up to five planted faults, which must all be
told. No case may raise anything but ConfigError, end with another exit code than 0 or 2, take long, start an actor or
leave a file. Exit code 1 if one does.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.data import Text
from raypar.actors.specs.model import GPT
from raypar.actors.specs.optim import SGD, AdamW, Muon
from raypar.actors.specs.run import Run
from raypar.cli.main import run_command as command_line
from raypar.config.recipe_tables import RECIPES
from raypar.config.recipes import recipe
from raypar.config.run import check_run
from raypar.config.toml import load_run, plain_of, run_of, toml_of
from raypar.errors import ConfigError
from raypar.reporting.summary import plan_rows
from raypar.schedules import build, to_csv
from raypar.schedules.drawing.text import text

PARTS = (("", Run), ("model", GPT), ("mesh", Mesh), ("data", Text), ("optim", AdamW), ("optim", SGD), ("optim", Muon))
PATHS = sorted({f"{part}.{field.name}".lstrip(".") for part, kind in PARTS for field in fields(kind)})
NUMBERS = [0, -1, 1, 2, 3, 4, 7, 8, 40, 10**9, 10**18, -(10**18), 2**63, 10**400, 2.0, 0.5, -0.0, 1e-300, 1e308]
NUMBERS += [float("nan"), float("inf"), float("-inf"), True, False]
NAMES = """
    1f1b 1F1B gpipe interleaved naive forward even balanced sgd adamw muon full none None nan 1 {} [1,2] gpt-tiny cuda
    auto wsd sqrt parameter_server cosine ring ulysses 2d:2x2 2.5d:2x2x2 3d:2x2x2 2d:2x3 4d:2x2
    mine.py:make mine.py no.py:make %s%n{0}
"""
TEXTS = [*NAMES.split(), "", " ", "x" * 100_000, "nul\0", "two\nlines", "\u00e9\U0001f600", "\udcff"]
PLACES = """
    ok.csv bad.csv page.csv gone.csv folder.csv pipe.csv zero.csv loop.csv ok.toml bad.toml pipe.toml zero.toml folder
    pipe loop dangling a.txt a.txt/x empty odd.bin /dev/null /dev/zero /dev/null/x /proc/self/x ~nobody/x .. . * [ **
    runs/new .hidden link/run gone/step-00000001 folder/step-00000002
"""
FILES = [*PLACES.split(), "a b", "nul\0.csv", "y" * 300]
ODD: list[Any] = [None, [], [[]], [1, 2.5], [1] * 1000, {}, {"a": {"b": {}}}, datetime.date(2020, 1, 1), b"x", object()]
ODD += [(4, 4), (2, -2), (0.9, 0.95), ("wandb",), 3j, Path("x"), print, GPT, Mesh(), build("gpipe", 2, 4)]

SECONDS = 2.0  # of this process, for any case
LONGEST = 20.0  # after which a case is given up


class HangError(BaseException):
    """A case that does not come to its end."""


def furnish(here: Path) -> None:
    """What lies around where the cases run."""
    (here / "a.txt").write_text("to be or not to be, that is the question\n" * 400)
    (here / "empty").touch()
    (here / "odd.bin").write_bytes(b"abc")
    (here / "ok.csv").write_text(to_csv(build("1f1b", 2, 4)))
    (here / "bad.csv").write_text("0F0,0B0\n1B0,1F0\n")
    (here / "page.csv").write_text("<html>,\n" * 1000)
    (here / "ok.toml").write_text('recipe = "gpt-tiny"\n[data]\npath = "a.txt"\ncache = "cache"\n')
    (here / "bad.toml").write_text("steps = [\n")
    (here / "mine.py").write_text("raise SystemExit('code of the user ran')\n")
    for name in ("folder", "folder.csv", "folder/step-00000002"):
        (here / name).mkdir()
    for name, target in (("loop", "loop"), ("loop.csv", "loop.csv"), ("dangling", "gone"), ("link", "folder")):
        (here / name).symlink_to(target)
    for name in ("pipe", "pipe.csv", "pipe.toml"):
        os.mkfifo(here / name)
    for name in ("zero.csv", "zero.toml"):
        (here / name).symlink_to("/dev/zero")


def odd_value(draw: random.Random) -> Any:
    """Anything; most often what is close to something that could be meant."""
    pool: list[Any] = draw.choice([[1, 2, 3, 4, 8, 16, 0.1], NUMBERS, TEXTS, FILES, ODD])
    return draw.choice(pool)


def odd_key(draw: random.Random) -> str:
    """A field, by its path; sometimes one with a slip, or none at all."""
    path = draw.choice(PATHS)
    kind = draw.random()
    if kind < 0.1:
        at = draw.randrange(len(path))
        return path[:at] + draw.choice(["", "_", "x", "."]) + path[at + 1 :]
    return draw.choice(["", "a.b.c", "recipe", "\0", "x" * 5000, "\u00e9", "__class__"]) if kind < 0.15 else path


def odd_run(draw: random.Random) -> Run:
    """A recipe with odd values in some fields."""
    run = usual(draw)
    for _ in range(draw.randint(1, 4)):
        part, _, name = draw.choice(PATHS).rpartition(".")
        below = getattr(run, part) if part else run
        if is_dataclass(below) and not isinstance(below, type) and hasattr(below, name):
            changed = replace(below, **{name: odd_value(draw)})
            run = replace(run, **{part: changed}) if part else changed
    return run


def odd_table(draw: random.Random) -> dict[str, Any]:
    """A recipe as a table, with odd keys and values."""
    table = plain_of(usual(draw))
    table["data"] = {"path": "a.txt", "cache": "cache"}
    for _ in range(draw.randint(1, 4)):
        part, _, name = odd_key(draw).rpartition(".")
        below = table.setdefault(part, {}) if part else table
        if isinstance(below, dict):
            below[name] = odd_value(draw)
    return table


def odd_file(draw: random.Random, path: Path) -> None:
    """A TOML file of an odd table, with a slip of the pen at times."""
    try:
        written = toml_of(odd_table(draw))
    except (TypeError, ValueError):  # what no file can say
        written = draw.choice(["a" + ".b" * 50_000 + " = 1", "a = " + "[" * 50_000, "a = " + "9" * 5000, "\0", "= 1"])
    if draw.random() < 0.3:
        at = draw.randrange(len(written))
        written = written[:at] + draw.choice(["", "[", '"', "=", "\n", "\0", "{", "'''", "#", "."]) + written[at + 1 :]
    path.write_text(written, encoding="utf-8", errors="surrogateescape")


def odd_words(draw: random.Random) -> list[str]:
    """What may stand behind ``raypar train``."""
    words = [draw.choice([*RECIPES, "gpt-tiny", "gpt-tiny", *FILES, "gpt-tny", ""])] if draw.random() < 0.9 else []
    words += ["--data.path", "a.txt", "--data.cache", "cache", "--dry-run"]
    for _ in range(draw.randint(1, 4)):
        key = draw.choice([odd_key(draw).replace("_", "-"), "log", "trace", "resume", "wait-for-nodes", "optim.kind"])
        value = odd_value(draw)
        spelled = [str(item)[:200_000] for item in (value if isinstance(value, list | tuple) else [value])]
        kind = draw.random()
        if kind < 0.6:
            words += [f"--{key}", *spelled]
        elif kind < 0.75:
            words.append(f"--{key}={' '.join(spelled)}")
        elif kind < 0.85:
            words.insert(draw.randrange(len(words) + 1), f"--{key}")
        else:
            words.insert(
                draw.randrange(len(words) + 1), draw.choice(["--", "-h", "-x", "--no-dry-run", *spelled, *TEXTS])
            )
    return words


def usual(draw: random.Random) -> Run:
    """A run that is right."""
    return replace(recipe(draw.choice(["gpt-tiny", "gpt-small"])), data=Text("a.txt", cache="cache"))


# Faults that are told whatever else is wrong, by the path that must be named.
PLANTS: dict[str, Any] = {
    "schedule": "1f2b", "chunks": 0, "microbatches": "8", "micro_batch_size": 0, "data_parallel": "zero",
    "bucket_mb": float("nan"), "servers": 0, "zero": 4, "clip": -1.0, "recompute": "some", "split": "odd", "seed": 1.5,
    "steps": 0, "eval_every": -1, "eval_steps": True, "folder": "a b", "save_every": -2, "keep_last": 0,
    "track": ("nobody",), "threads": 10**9, "device": "tpu", "timeout": 0.0, "model.layers": 0, "model.hidden": None,
    "model.heads": 2.0, "model.seq": -5, "model.vocab": "all", "model.mlp": 0, "model.dropout": 1.0, "model.tied": 1,
    "mesh.pp": 0, "mesh.dp": -1, "mesh.cp": 0, "mesh.tp": "x", "mesh.ep": 0, "data.path": "gone.txt",
    "data.tokenizer": "gone.json", "data.val_path": "gone.val", "data.val_fraction": 1.5, "data.cache": "a.txt/x",
    "optim.lr": 0.0, "optim.betas": (0.9,), "optim.eps": -1.0, "optim.weight_decay": float("inf"), "optim.warmup": -1,
    "optim.decay": "cos", "optim.final": 2.0, "optim.kind": "adam", "optim.decay_steps": 0, "optim.decay_form": "exp",
    "optim.no_decay": "*.bias", "optim.rates": {"*": -1.0},
}  # fmt: skip


def planted(draw: random.Random) -> tuple[Run, list[str]]:
    """A run with up to five faults, and the paths that must be told."""
    run, paths = usual(draw), draw.sample(sorted(PLANTS), draw.randint(1, 5))
    if "data.val_path" in paths and "data.val_fraction" in paths:  # which then does not count
        paths.remove("data.val_fraction")
    for path in paths:
        part, _, name = path.rpartition(".")
        changed = replace(getattr(run, part) if part else run, **{name: PLANTS[path]})
        run = replace(run, **{part: changed}) if part else changed
    return run, paths


# --- what comes of it ------------------------------------------------------------------------------------------------


def planned(run: Run) -> str:
    """Check a run and plan it."""
    schedule = check_run(run)["train"]
    text(schedule)
    plan_rows(run, schedule)
    return "a plan"


def said(words: list[str]) -> str:
    """What the command line makes of words."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command_line(["train", *words])
    err.seek(0)
    assert code in (0, 2), f"exit code {code}: {err.read()[-500:]}"
    assert "Traceback" not in err.read()
    return "a plan" if code == 0 else "mistakes on the command line"


def outcome(case: int, here: Path) -> str:
    """What comes of a case, in a word. Raises AssertionError and whatever it should not."""
    draw, kind = random.Random(case), case % 8
    if kind < 1:
        return said(odd_words(draw))
    try:
        if kind < 3:
            return planned(odd_run(draw))
        if kind < 5:
            return planned(run_of(odd_table(draw)))
        if kind < 6:
            odd_file(draw, here / "case.toml")
            return planned(load_run(here / "case.toml"))
        run, paths = planted(draw)
        planned(run)
    except ConfigError as error:
        assert error.faults and all(error.faults), "no fault is told"
        if kind >= 6:
            untold = [path for path in paths if not any(path in fault for fault in error.faults)]
            assert not untold, f"{untold} of {paths} are not told: {str(error)[:500]}"
            return "all planted faults"
        return "faults"
    assert kind < 6, f"{paths}: no fault is told"
    return "a plan"


def violation(case: int, here: Path) -> tuple[str, str | None]:
    """What comes of a case, and what it did that it must not; its working directory has to be ``here``."""
    before, start, wrong, came = _tree(here), time.process_time(), None, "a violation"
    signal.setitimer(signal.ITIMER_REAL, LONGEST)
    try:
        came = outcome(case, here)
    except (Exception, HangError) as error:
        wrong = f"{type(error).__name__}: {str(error)[:800]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    took = time.process_time() - start
    if wrong is None and took > SECONDS:
        wrong = f"took {took:.1f} s"
    if left := _tree(here) - before - {"case.toml"}:
        wrong = wrong or f"left {sorted(left)}"
        for name in left:
            (here / name).unlink() if (here / name).is_file() else None
    return came, wrong


def _tree(here: Path) -> set[str]:
    """What lies there, but for caches: those a run has named."""
    return {path.name for path in here.iterdir() if not (path.name == "tokens" or any(path.rglob("tokens")))}


@contextlib.contextmanager
def sandbox(here: Path) -> Iterator[None]:
    """Work in a new folder, furnished, with an alarm for what hangs."""

    def alarm(number: int, frame: object) -> None:
        raise HangError(f"given up after {LONGEST:g} s")

    was, handler, home = Path.cwd(), signal.signal(signal.SIGALRM, alarm), os.environ.get("HOME")
    here.mkdir()
    furnish(here)
    os.chdir(here)
    os.environ["HOME"] = str(here / "cache")
    try:
        yield
    finally:
        os.chdir(was)
        signal.signal(signal.SIGALRM, handler)
        os.environ.pop("HOME") if home is None else os.environ.update(HOME=home)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    told = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    counts, wrongs, start, slowest = Counter[str](), 0, time.perf_counter(), 0.0
    with tempfile.TemporaryDirectory() as folder, sandbox(here := Path(folder) / "here"):
        for case in range(told.first, told.first + told.cases):
            began = time.process_time()
            came, wrong = violation(case, here)
            slowest = max(slowest, time.process_time() - began)
            counts[came] += 1
            if wrong is not None:
                wrongs += 1
                print(f"case {case}: {wrong}", flush=True)
    for came, count in sorted(counts.items()):
        print(f"{came:30} {count:6}")
    print(f"{wrongs} violations in {time.perf_counter() - start:.0f} s, the slowest case {slowest:.1f} s")
    return 1 if wrongs else 0


if __name__ == "__main__":
    sys.exit(main())
