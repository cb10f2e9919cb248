"""Are bits and figures the same as at an earlier commit?

    python -m tests.long.same_bits --since COMMIT [--runs 1f1b zero2 ...]

Each of the two trees runs, by its own code and on real actors: two steps of many runs (losses, gradient norms and
weights are compared bit by bit), and the commands (their figures are compared, without times). The present tree then
resumes a checkpoint of the earlier one, and reports its run folder. Exit code 1 if something differs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.examples import TALK, made_jsonl, made_tokenizer

ROOT = Path(__file__).parents[2]
RUNS = Path(__file__).with_name("runs_of_a_tree.py")
SECONDS = 600.0  # of one command
PROMPT = "line 7"
TRAIN = (
    "train",
    "gpt-tiny",
    "--mesh.pp",
    "2",
    "--microbatches",
    "4",
    "--steps",
    "2",
    "--data.path",
    "text.txt",
    "--save-every",
    "1",
)
LLAMA = (
    "train",
    "llama-tiny",
    "--steps",
    "1",
    "--data.path",
    "text.txt",
    "--data.tokenizer",
    "tokenizer",
    "--model.vocab",
    "258",
)
SFT = ("sft", "talks.jsonl", "--model", "llama", "--mesh.pp", "2", "--steps", "2", "--microbatches", "2")
COMMANDS = {  # in this order, each in the same folder
    "train": (*TRAIN, "--folder", "run"),
    "resume": ("train", "--resume", "run", "--steps", "3"),
    "verify": ("verify", "gpt-tiny", "--mesh.pp", "2", "--schedule", "interleaved"),
    "draw": ("draw", "zb-v", "--ranks", "4", "--microbatches", "8"),
    "simulate": ("simulate", "1f1b", "--ranks", "4", "--microbatches", "8"),
    "check": ("check", "gpipe", "--ranks", "4", "--microbatches", "8"),
    "plan": ("plan", "gpt-124m", "--gpus", "16", "--gpu", "h100"),
    "plan levels": ("plan", "moe-small", "--mesh.dp", "4"),
    "generate": ("generate", "run", PROMPT, "--temperature", "0", "--max-new-tokens", "8"),
    "train a Llama": (*LLAMA, "--folder", "base"),
    "export": ("ckpt", "export", "base", "llama"),
    "sft": (*SFT, "--folder", "tuned"),
    "ckpt verify": ("ckpt", "verify", "run"),
    "report": ("report", "run"),
}
_TIMES = re.compile(
    r"~?\d[\d.,]*\s*(?:us|ms|s|min|h|tokens/s|GiB/s|MiB/s|TFLOP/s|GFLOP/s|%)(?!\w)"
    r"|\d\d:\d\d(?::\d\d)?|\d{4}-\d\d-\d\d|pid \d+|0x\w+"
)
_NUMBERS = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
_BUSY = (
    "free",
    "Ray",
    "ray",
    "load",
    "predicted",
    "measured",
    "tokens/s",
    "memory",
    "calibrat",
    "/tmp",
    "version",
    "commit",
)


def figures(text: str) -> list[str]:
    """Return the numbers of an output that no machine's speed or load decides, in order."""
    lines = [line for line in text.splitlines() if not any(word in line for word in _BUSY)]
    return [number for line in lines for number in _NUMBERS.findall(_TIMES.sub("", line))]


def tree_of(commit: str, folder: Path) -> Path:
    """Unpack the files of a commit into a folder, and return it."""
    folder.mkdir()
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed, check=True)
    return folder


def begun(folder: Path) -> Path:
    """Make a folder with texts, examples and a tokenizer, and return it."""
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text("".join(f"line {n} of a text, {n * n} and {n % 7}\n" for n in range(4000)))
    made_jsonl(folder / "talks.jsonl", [{"messages": TALK}] * 20)
    made_tokenizer(folder / "tokenizer")
    return folder


def of_tree(tree: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a tree's raypar in a folder."""
    env = os.environ | {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def results(tree: Path, folder: Path, chosen: list[str]) -> dict[str, list[Any]]:
    """Return what a tree's runs and commands give, by name."""
    made = of_tree(tree, begun(folder), str(RUNS), "runs.json", *chosen)
    if made.returncode:
        raise SystemExit(f"runs of {tree}: {made.stderr[-3000:]}")
    found: dict[str, list[Any]] = dict(json.loads((folder / "runs.json").read_text()))
    for name, words in COMMANDS.items():
        done = of_tree(tree, folder, "-m", "raypar", *words)
        texts = (line for line in done.stdout.splitlines() if line.startswith(PROMPT))
        found[f"raypar {name}"] = [done.returncode, *figures(done.stdout), *texts]
        if done.returncode:
            print(f"{name} of {tree.name}: {done.stderr[-1500:]}")
        if name == "train":
            shutil.copytree(folder / "run", folder / "earlier")
    found["metrics"] = [metrics_of(folder / name) for name in ("run", "tuned")]
    return found


def metrics_of(run: Path) -> list[list[Any]]:
    """Return step, loss and gradient norm of each line of a run's metrics."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [[line.get("step"), line.get("loss"), line.get("grad_norm")] for line in lines if "loss" in line]


def differences(before: dict[str, list[Any]], after: dict[str, list[Any]]) -> Iterator[str]:
    """Yield a line for each result that differs."""
    for name in sorted(before.keys() | after.keys()):
        if (one := before.get(name)) != (other := after.get(name)):
            yield f"{name}: {_first(one, other)}"


def _first(one: Any, other: Any) -> str:
    if isinstance(one, list) and isinstance(other, list):
        pairs = [(a, b) for a, b in zip(one, other, strict=False) if a != b]
        return f"{len(one)} and {len(other)} figures, first different ones: {pairs[:3]}"
    return f"{one} and {other}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", required=True, help="the earlier commit")
    parser.add_argument("--runs", nargs="*", default=[], help="of the runs these; the default: all")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        earlier = tree_of(chosen.since, folder / "earlier")
        before = results(earlier, folder / "before", chosen.runs)
        after = results(ROOT, folder / "after", chosen.runs)
        found = list(differences(before, after))
        found += [f"{name} fails" for name in before if name.startswith("raypar ") and before[name][0]]
        resumed = of_tree(ROOT, folder / "before", "-m", "raypar", "train", "--resume", "earlier", "--steps", "3")
        reported = of_tree(ROOT, folder / "before", "-m", "raypar", "report", "earlier")
        found += [f"{done.args[3:]}: {done.stderr[-800:]}" for done in (resumed, reported) if done.returncode]
        if not resumed.returncode and [metrics_of(folder / "before" / "earlier")] != before["metrics"][:1]:
            found.append("the present tree resumes the earlier one's checkpoint with other bits")
    for line in found:
        print(line)
    print(f"{len(before)} results of {chosen.since} and now: {len(found)} differ")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
