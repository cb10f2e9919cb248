"""Conversion in several processes: the same bytes as in one, and what is told when one of them ends."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

import raypar as rp
from raypar.actors.data import conversion, conversion_progress
from raypar.actors.data.conversion import ConversionError, by_size, in_processes
from raypar.actors.data.conversion_progress import conversion_progress as progress
from raypar.actors.data.examples.example_files import open_examples
from raypar.actors.data.text.text_files import TextError, open_tokens
from tests.support.examples import TALK, made_jsonl, made_tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


@dataclass(frozen=True)
class Upper:
    """A conversion that another process can import from here."""

    end: str

    def __call__(self, block):
        if block == b"wrong":
            raise ValueError("this one is wrong")
        if block == b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        if block == b"leave":
            raise SystemExit("no such thing")
        if block == b"hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        return block.upper() + self.end.encode()


def sent(conversion, blocks, size, count=2):
    """Convert in processes, however little there is."""
    return in_processes(conversion, blocks, count)


@pytest.fixture
def upper(monkeypatch):
    """The conversion as another process knows it: pytest imports this file under a name of its own."""
    monkeypatch.setattr(Upper, "__module__", "tests.actors.data.test_conversion")
    return Upper("!")


def children():
    """The processes that this thread has started, and that are there."""
    own = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children")
    return set(map(int, own.read_text().split()))


def pools():
    """The threads of pools that are alive now, of whatever tests."""
    return {one for one in threading.enumerate() if "ThreadPool" in one.name}


def test_what_comes_back_is_in_order_and_the_processes_end(upper):
    before = pools()
    blocks = [bytes([97 + i % 26]) * (1 + 40_000 * (i % 3)) for i in range(40)]
    assert [*in_processes(upper, blocks, 3)] == [*map(upper, blocks)]
    assert pools() <= before


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("block", "error", "says"),
    [
        (b"wrong", ValueError, "^this one is wrong$"),
        (b"die", ConversionError, "was ended by SIGKILL, perhaps for want of memory"),
        (b"leave", ConversionError, r"was ended with exit code 1 \(no such thing\)"),
    ],
)
def test_a_process_that_fails_is_told(block, error, says, upper):
    found = in_processes(upper, [b"a", block, b"b", b"c"], 2)
    assert next(found) == b"A!"
    with pytest.raises(error, match=says):
        list(found)


def test_one_that_does_not_answer_is_told_and_ended(upper, monkeypatch):
    process = conversion._Process(upper)
    try:
        assert process.converted(b"a") == b"A!"
        monkeypatch.setattr(conversion, "_SECONDS", 0.5)
        with pytest.raises(ConversionError, match=r"has not answered for \d s: see whether it is stopped"):
            process.converted(b"hang")
    finally:
        process.end()
    assert process._child.returncode == -signal.SIGKILL


def test_a_caller_that_stops_ends_the_processes(upper):
    before = pools()
    found = in_processes(upper, (b"a" for _ in range(1000)), 2)
    next(found)
    found.close()
    assert pools() <= before


def test_small_data_stays_in_this_process(upper, monkeypatch):
    monkeypatch.delattr(conversion, "_Process")
    monkeypatch.setattr(conversion, "num_cores", lambda: 8)
    assert [*by_size(upper, [b"a", b"b"], 8 << 20 >> 1)] == [b"A!", b"B!"]
    with pytest.raises(NameError):
        list(by_size(upper, [b"a"], 9 << 20))


def test_examples_are_the_same_bytes_in_any_number_of_processes(tmp_path, monkeypatch):
    folder = made_tokenizer(tmp_path / "tokenizer")
    monkeypatch.setattr("raypar.actors.data.examples.example_blocks._EXAMPLES", 7)
    records = [{"text": "x" * (i % 30)} if i % 3 else {"messages": TALK} for i in range(60)]
    path = str(made_jsonl(tmp_path / "data.jsonl", records))
    facts = set()
    for name, convert in {"one": by_size, "three": partial(sent, count=3)}.items():
        spec = rp.Examples(path, str(folder), cache=str(tmp_path / name))
        facts.add(open_examples("path", path, spec, convert).facts)
        contents = {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted((tmp_path / name).rglob("*.*"))
        }
        facts.add(str(contents))
    assert len(facts) == 2


def test_faults_of_later_blocks_know_their_lines_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("raypar.actors.data.examples.example_blocks._EXAMPLES", 4)
    path = made_jsonl(tmp_path / "data.jsonl", [{"text": "x"}] * 20)
    lines = path.read_text().splitlines()
    lines[9:9], lines[15] = ["", "  "], "{"
    path.write_text("\n".join([*lines, '{"texts": 1}']))
    spec = rp.Examples(str(path), cache=str(tmp_path / "cache"))
    with pytest.raises(TextError) as caught:
        open_examples("path", str(path), spec, sent)
    assert [fault.partition(" (")[0].partition(":  ")[0] for fault in caught.value.faults] == [
        "path: line 16 of data.jsonl is not JSON",
        "path: line 23 of data.jsonl has texts: an example has text, messages, or prompt and completion",
    ]
    assert not [*(tmp_path / "cache" / "examples").iterdir()]


def test_text_is_the_same_in_processes_and_one_that_dies_leaves_nothing(tmp_path, monkeypatch):
    folder = made_tokenizer(tmp_path / "tokenizer")
    monkeypatch.setattr("raypar.actors.data.text.text_sources._CHUNK", 100)
    (tmp_path / "a.txt").write_text("one two three\n" * 99)
    (tmp_path / "b.txt").write_text("vier fünf\n" * 99)
    path = str(tmp_path / "*.txt")
    found = [open_tokens("path", path, str(folder), str(tmp_path / str(how)), how)[1] for how in (by_size, sent)]
    assert found[0] == found[1]

    others = children()  # Ray's, if tests on actors have run in this process before

    def killed(conversion, blocks, size):
        yield from in_processes(conversion, _after(blocks, 5), 2)

    def _after(blocks, number):
        for at, block in enumerate(blocks):
            if at == number:
                for child in children() - others:
                    os.kill(child, signal.SIGKILL)
            yield block

    with pytest.raises(TextError, match=r"is not converted: process \d+, which converts data, was ended by SIGKILL"):
        open_tokens("path", path, str(folder), str(tmp_path / "killed"), killed)
    assert not [*(tmp_path / "killed" / "tokens").iterdir()]


def test_how_far_it_is_is_told(monkeypatch, caplog):
    with progress(1 << 20) as read:
        read(1 << 20)
    assert not caplog.messages
    monkeypatch.setattr(conversion_progress, "_INTERVAL", 0.0)
    with caplog.at_level("INFO", logger="raypar"), progress(16 << 20) as read:
        read(4 << 20)
    (line,) = caplog.messages
    assert line.startswith("converted 25%, ") and line.endswith(" s left")


def test_on_a_terminal_it_is_a_bar(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with progress(16 << 20) as read:
        read(4 << 20)
    assert "converting" in capsys.readouterr().err
