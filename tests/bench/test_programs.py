"""Every program of the bench at its smallest size: its table has the rows that it should, with plausible figures.

They run in this process, on the Ray and the actors that other tests have too; what they print means nothing.
"""

from __future__ import annotations

import logging
import os
import re
import signal
from importlib import import_module
from pathlib import Path

import pytest
import torch

import raypar as rp
from raypar.checkpoint.hugging_face import export
from tests.bench.asynchronous import PAIRS
from tests.bench.block_ops import ACTIONS as BLOCK_ACTIONS
from tests.bench.bubble_prediction import HEADER
from tests.bench.chunks import FORMS
from tests.bench.copy_cost import RUNS as COPIED
from tests.bench.driver_at_scale import PARTS, TASKS
from tests.bench.group_speed import NBYTES, OPS, measure_groups
from tests.bench.overhead import measure_overhead
from tests.bench.save_stall import Saved, Took, report
from tests.bench.snapshot_cost import RUNS as SNAPSHOT_RUNS
from tests.support.examples import made_tokenizer
from tests.support.hosts import missing
from tests.support.hugging_face import checkpoint_of
from tests.support.team import Team
from tests.support.thinned import thinned

FOLDER = Path(__file__).parent
NO_PROGRAMS = {"child": "a process of a contestant, which __main__ starts"}
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?"


def programs() -> list[str]:
    """The modules here that have a ``main``."""
    named = [path.stem for path in sorted(FOLDER.glob("*.py")) if re.search(r"^def main\(", path.read_text(), re.M)]
    return [name for name in named if name not in NO_PROGRAMS]


# What each prints, a line a text: {+} is a number above 0, {} any number, {*} any text. Runs of spaces count as one.
STEP_TIMES = "{+} ms of CPU {+} ms (2: {+} to {+})"
SAVES = "a step without a save takes {+} s (median of {+}); others use {} cores"
SNAPSHOT = (
    "a step of {+} ms takes {}% longer with a snapshot of {} MiB (quarters {}% to {}% of 2 pairs); others used {} cores"
)
COPY = (
    "a copy of {} MiB of each actor takes {} ms of steps of {+} ms (quarters {} to {} of 2 blocks), which is {}% of "
    "ten steps; the machine's load is {}"
)
TABLES = {
    "__main__": [
        "{*} cores, {*} Python {*}, torch {*}",
        "smallest: {*}",
        "who {*}",
        "one process {+} {+} to {+} - {+} - 0",
    ],
    "asynchronous": [
        *(f"m=2 {schedule} {{+}} ms a step, {{+}} times as fast as 1f1b" for schedule in PAIRS[2]),
        "others used {} cores",
    ],
    "block_ops": [
        "Ops of one block, of a microbatch",
        "block of dtype action raypar transformers views: raypar views: transformers",
        *(
            f"{model} {dtype} {action} {{+}} {{+}} {{+}} {{+}}"
            for model in ("Llama", "GPT")
            for dtype in ("fp32", "bf16")
            for action in BLOCK_ACTIONS.values()
        ),
    ],
    "bubble_prediction": [
        "load before: {}",
        " ".join(HEADER.split()),
        *(
            f"{schedule} {{+}}% {{+}}% {{+}}% {{+}}% {{}} {{+}} {{+}} {{}}% {{}}"
            for schedule in ("1f1b", "interleaved")
        ),
    ],
    "chunks": [
        "64 tokens, 4 heads of 64, float32, one thread: peak beyond the inputs, forward and backward",
        *(f"{form} {{}} MiB {{}} s" for form in FORMS),
    ],
    "driver_at_scale": [
        "{*} cores, load {}; a step lasts 0.2 s",
        *(f"16 actors, dp {what} {{}} s, {{}} s of CPU" for what in PARTS),
        *(f"16 actors, pp x tp x dp {what} {{}} s, {{}} s of CPU" for what in TASKS),
    ],
    "generation": [
        "pp=2, 5 prompts of unequal lengths: {*}",
        "pp=2, 2 prompts x 2 tokens: {+} tokens/s, {*} others used {} cores",
    ],
    "long_sequence": [
        "128 tokens, ring; memory beyond that of a run on 64 tokens",
        "cp=1 loss 4.179{} {+} s {} MiB",
        "cp=2 loss 4.179{} {+} s {} MiB",
    ],
    "overhead": [
        "A step of an empty model (pp=2, m=8) of 66 actions, 2 times",
        "executor median ms least ms us an action",
        "compiled {+} {+} {+}",
        "tasks {+} {+} {}",
        "tasks, dynamic order {+} {+} {}",
    ],
    "save_stall": [f"tiny-{title}: {SAVES}" for title in ("pipeline", "replicas")],
    "schedules_at_scale": [
        "whose schedule ranks mb actions generate lower check MiB",
        *(
            f"{whose} {name} 2 4 {{+}} {{}}s {{}}s {{}}s {{+}}"
            for name in ("1f1b", "interleaved")
            for whose in ("torch", "raypar")
        ),
    ],
    "shadowing": [
        "expert_shadows=0: a step takes {+} ms; the actors compute {+} and {+} ms of it",
        "expert_shadows=2: a step takes {+} ms; the actors compute {+} and {+} ms of it",
        "{+} times as fast with shadows; others used {} cores",
    ],
    "snapshot_cost": [f"{title}: {SNAPSHOT}" for title in SNAPSHOT_RUNS],
}
OF_HOSTS = {  # those that need hosts of their own, and with them a second Ray
    "copy_cost": [f"{title}, {rate}: {COPY}" for rate in ("no limit", "1gbit") for title in COPIED],
    "four_hosts": [f"{who}: {{+}} s a step ({{+}} to {{+}}), {{+}} of FSDP2" for who in ("FSDP2", "zero=1 now")],
}


def lines_of(text: str) -> list[str]:
    """The lines that are not empty, in which runs of spaces are one."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def assert_printed(lines: list[str], table: list[str]) -> None:
    """Assert that lines are those of a table."""
    assert len(lines) == len(table), "\n".join(lines)
    for line, wanted in zip(lines, table, strict=True):
        parts = re.split(r"(\{[+*]?\})", " ".join(wanted.split()))
        kinds = {"{+}": f"({NUMBER})", "{}": NUMBER, "{*}": ".*"}
        found = re.fullmatch("".join(kinds.get(part, re.escape(part)) for part in parts), line)
        assert found, f"{line!r} is not {wanted!r}"
        assert all(float(number.replace(",", "")) > 0 for number in found.groups()), line


@pytest.fixture(autouse=True)
def level_of_the_log():
    """Programs choose what is logged; the tests that follow in this process have it as before."""
    log = logging.getLogger("raypar")
    before = log.level
    yield
    log.setLevel(before)


@pytest.fixture
def as_before():
    """What a program sets for its process is as before after it."""
    handler, threads, environment = signal.getsignal(signal.SIGTERM), torch.get_num_threads(), dict(os.environ)
    yield
    signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def further_words(tmp_path):
    """A function: what a program is told beside ``--smallest``."""

    def words(name: str) -> list[str]:
        if name == "__main__":
            return ["--out", str(tmp_path)]
        return [str(generating(tmp_path))] if name == "generation" else []

    return words


def generating(folder: Path) -> Path:
    """A folder of Hugging Face with a Llama that knows the tokens of a tokenizer."""
    ids = torch.zeros(1, 8, dtype=torch.int64)
    model = rp.Llama(layers=2, hidden=16, heads=2, seq=64, vocab=259)
    run = rp.Run(model=model, data=rp.Batches(lambda *_: (ids, ids)), microbatches=1, micro_batch_size=1, timeout=20.0)
    return made_tokenizer(export(checkpoint_of(Team.of(run), folder / "saved"), folder / "model"))


def test_every_program_has_a_table():
    assert sorted([*TABLES, *OF_HOSTS]) == programs()


@pytest.mark.parametrize("name", thinned(TABLES, lambda name: name != "driver_at_scale"))
def test_a_program_prints_its_table(cluster, kept_actors, as_before, further_words, capsys, name):
    if name == "block_ops":
        pytest.importorskip("transformers")
    failed = import_module(f"tests.bench.{name}").main(["--smallest", *further_words(name)])
    assert not failed
    lines = lines_of(capsys.readouterr().out)
    if name == "save_stall":  # whether a save takes longer than a step is chance
        lines = [line for line in lines if not line.startswith(("step ", "median of"))]
    assert_printed(lines, TABLES[name])


def test_a_save_takes_what_its_steps_lost(capsys):
    """Of steps of 1 s those after the fourth, while a save is written, take 1.5 and 1.2 s."""
    seconds = [1.0, 1.0, 1.0, 1.0, 1.5, 1.2, 1.0, 1.0]
    ends = [100.0 + sum(seconds[: number + 1]) for number in range(len(seconds))]
    steps = [Took(end, took, 0.25) for end, took in zip(ends, seconds, strict=True)]
    report("a run", 4, steps, {4: Saved(ends[5] + 0.1, 10_000_000)})
    assert lines_of(capsys.readouterr().out) == [
        "a run: a step without a save takes 1.000 s (median of 3); others use 0.25 cores",
        "step 4: 10.0 MB in 2.800 s; its 3 steps lost 0.700 s, 25.0% of that; others used 0.25 cores",
        "median of 1 saves: one takes 2.800 s, training loses 0.700 s by it, 25.0% of that",
    ]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", OF_HOSTS)
def test_a_program_of_hosts_prints_its_table(capsys, name):
    if lacks := missing():
        pytest.skip(lacks)
    import_module(f"tests.bench.{name}").main(["--smallest"])
    assert_printed(lines_of(capsys.readouterr().out), OF_HOSTS[name])


def assert_measured(seconds: dict[str, list[float]], rounds: int) -> None:
    """Assert that both groups have been timed in so many rounds."""
    assert set(seconds) == {"raypar", "gloo"}
    assert all(len(of_group) == rounds and min(of_group) > 0 for of_group in seconds.values())


@pytest.mark.long
def test_groups_of_actors_and_what_a_process_holds_are_measured(cluster, kept_actors):
    samples = measure_groups((2,), NBYTES[:1], 2)
    assert [sample.op for sample in samples] == [*OPS]
    for sample in samples:
        assert_measured(sample.seconds, 2)
    found = measure_overhead(1)
    assert found.steps.launch > 0
    assert all(100 * 2**20 < held < 2**30 for held in (found.actor_memory, found.process_memory))
