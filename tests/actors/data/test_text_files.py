"""Finding, converting and caching text."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from raypar.actors.data.text import text_files, text_sources
from raypar.actors.data.text.text_files import TextError, open_tokens
from raypar.actors.data.text.token_batches import text_faults
from raypar.actors.specs.data import Text

tokenizers = pytest.importorskip("tokenizers")


def tokens_of(path, cache, tokenizer=None):
    return open_tokens("path", str(path), None if tokenizer is None else str(tokenizer), str(cache))


def text_of(path, cache):
    return bytes(tokens_of(path, cache)[0]).decode()


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "text"
    (root / "sub").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "b.txt").write_text("bravo\n")
    (root / "sub" / "a.txt").write_text("alpha")
    (root / "z.txt").write_text("zulu")
    (root / "picture.png").write_bytes(b"\x89PNG\0\0")
    (root / "ids.bin").write_bytes(b"abcd")
    (root / ".hidden").write_text("hidden")
    (root / ".git" / "config").write_text("hidden")
    (root / "broken").symlink_to("nowhere")
    return root


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A byte-level BPE with 300 ids, trained here."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_folder_is_its_text_files_in_order_with_newlines_between(folder, tmp_path):
    assert text_of(folder, tmp_path) == "bravo\nalpha\nzulu"


def test_what_is_converted_is_said(folder, tmp_path, caplog):
    with caplog.at_level("INFO", logger="raypar"):
        tokens_of(folder, tmp_path)
        tokens_of(folder / "z.txt", tmp_path)
    (all_of, one) = caplog.messages
    assert all_of.endswith(
        "to tokens, once: 3 files, 15 bytes (2 without text skipped: "
        "ids.bin is a .bin file, which is named by its own path; picture.png is no text: byte 4 is NUL)"
    )
    assert one.endswith("to tokens, once: 1 file, 4 bytes")


def test_files_in_other_encodings_are_named(folder, tmp_path, caplog):
    (folder / "wide.txt").write_text("sixteen bits", "utf-16")
    for number in range(7):
        (folder / f"old{number}.txt").write_text("déjà vu", "latin-1")
    with caplog.at_level("INFO", logger="raypar"):
        tokens_of(folder, tmp_path)
    said, warned = caplog.records
    wide = folder / "wide.txt"
    command = f"iconv -f UTF-16 -t UTF-8 {wide} > utf8.txt && mv utf8.txt {wide}"
    fix = f"wide.txt is UTF-16, and text is read as UTF-8: {command})"
    assert "3 without text skipped: " in said.getMessage() and said.getMessage().endswith(fix)
    assert warned.levelname == "WARNING"
    text = warned.getMessage()
    assert "7 files of it are not UTF-8, and learned with the wrong characters: old0.txt is text in another enc" in text
    assert f"iconv -f LATIN1 -t UTF-8 {folder / 'old4.txt'} > utf8.txt" in text
    assert "old5.txt" not in text and text.endswith("; and 2 more")


def test_glob_finds_files_at_every_depth(folder, tmp_path, monkeypatch):
    assert text_of(folder / "**" / "*.txt", tmp_path) == "bravo\nalpha\nzulu"
    assert text_of(folder / "*.txt", tmp_path) == "bravo\nzulu"
    monkeypatch.chdir(folder)
    assert text_of("**/a*", tmp_path) == "alpha"


def test_a_named_file_may_be_hidden(folder, tmp_path):
    assert text_of(folder / ".hidden", tmp_path) == "hidden"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\0\1\2\xff" * 9, "is no text: byte 0 is NUL: give a text file, or uint16 tokens in a file named .bin"),
        (b"\x89PNG\0\0", "is no text: byte 4 is NUL: give a text file, or uint16 tokens in a file named .bin"),
        (np.random.default_rng(0).integers(1, 256, 9999, np.uint8).tobytes(), "is no text: byte 1 (0x82) is not UTF-8"),
        ("für alle".encode("latin-1") * 99, "is text in another encoding, perhaps latin-1: byte 1 (0xfc) is not UTF-8"),
        (b"prix\xa0: 3" * 99, "is text in another encoding, perhaps latin-1: byte 4 (0xa0) is not UTF-8"),
        (b"prix\x9f\x80: 3" * 99, "is no text: byte 4 (0x9f) is not UTF-8"),
        (b"a\x01\x02\xe9b" * 99, "is no text: byte 3 (0xe9) is not UTF-8"),
        (b"a\n\t\xe9b" * 99, "is text in another encoding, perhaps latin-1: byte 3 (0xe9) is not UTF-8"),
        ("für alle".encode("utf-16"), "is UTF-16, and text is read as UTF-8: iconv -f UTF-16 -t UTF-8 "),
        ("für alle".encode("utf-16-le"), "is UTF-16, and text is read as UTF-8: iconv"),
    ],
)
def test_a_named_file_that_is_no_utf8_text_is_told(content, says, tmp_path):
    (tmp_path / "it.txt").write_bytes(content)
    with pytest.raises(TextError) as caught:
        tokens_of(tmp_path / "it.txt", tmp_path / "cache")
    (fault,) = caught.value.faults
    assert f"path: '{tmp_path / 'it.txt'}' {says}" in fault


def test_a_long_text_may_be_cut_in_a_character(tmp_path):
    (tmp_path / "it.txt").write_text("a" + "é" * 99_999, encoding="utf-8")
    assert tokens_of(tmp_path / "it.txt", tmp_path / "cache")[1].count == 199_999


def test_cache_inside_the_folder_is_not_text(folder):
    first = tokens_of(folder, folder / "cache")[1]
    assert tokens_of(folder, folder / "cache")[1] == first


def test_stdlib_is_a_million_tokens_of_python(tmp_path):
    tokens, facts = tokens_of("stdlib", tmp_path)
    assert facts.count == len(tokens) > 1_000_000
    assert facts.vocab == 256 and tokens.dtype == np.uint8 and not tokens.flags.writeable
    text = bytes(tokens).decode()
    assert "def namedtuple(" in text  # collections/__init__.py
    assert "def test_main(" not in text and "site-packages/pip/" not in text


def test_fingerprint_follows_names_contents_and_tokenizer_only(folder, tmp_path, bpe):
    def fingerprint(path, cache="cache", tokenizer=None):
        return tokens_of(path, tmp_path / cache, tokenizer)[1].fingerprint

    here = fingerprint(folder)
    folder = folder.rename(tmp_path / "moved")
    os.utime(folder / "b.txt", (1, 1))
    assert fingerprint(folder, "other cache") == here
    with_bpe = fingerprint(folder, tokenizer=bpe)
    assert with_bpe != here
    (folder / "z.txt").write_text("zuli")
    changed = fingerprint(folder)
    (folder / "z.txt").rename(folder / "y.txt")
    assert len({here, with_bpe, changed, fingerprint(folder)}) == 4


def test_second_open_converts_nothing(folder, tmp_path, monkeypatch):
    first, facts = tokens_of(folder, tmp_path)
    monkeypatch.delattr(text_files, "_convert")
    again, same = tokens_of(folder, tmp_path)
    assert same == facts and (again == first).all()
    entry = json.loads(next((tmp_path / "tokens").glob("*.json")).read_text())
    assert entry["count"] == len(first) and entry["max_id"] == int(first.max()) and entry["vocab"] == 256


def test_changed_text_is_converted_again(folder, tmp_path):
    text_of(folder, tmp_path)
    (folder / "z.txt").write_text("more")
    os.utime(folder / "z.txt", (1, 1))  # same size, another time
    assert text_of(folder, tmp_path).endswith("more")


@pytest.mark.parametrize("chunk", [*range(8, 24)])
def test_a_long_line_is_cut_between_characters(tmp_path, monkeypatch, chunk):
    """Characters of one to four bytes, at every place of a cut; a chunk is no longer than it must be."""
    monkeypatch.setattr(text_sources, "_CHUNK", chunk)
    text = "aé日😀😀日éa日日é" * 9
    (tmp_path / "a.txt").write_text(text)
    (file,) = text_sources.source_files("path", str(tmp_path / "a.txt"), tmp_path / "cache", [])
    chunks = [*text_sources.chunks_of(file, hashlib.sha256(), last=True)]
    assert "".join(part.decode() for part in chunks) == text
    assert all(chunk - 4 <= len(part) < chunk + 4 for part in chunks[:-1])


def test_a_line_is_cut_before_its_last_space_though_little_is_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(text_sources, "_CHUNK", 8)
    (tmp_path / "a.txt").write_text("a " + "b" * 20)
    (file,) = text_sources.source_files("path", str(tmp_path / "a.txt"), tmp_path / "cache", [])
    first, second, *_ = text_sources.chunks_of(file, hashlib.sha256(), last=True)
    assert first == b"a" and second.startswith(b" bbbb")


@pytest.mark.parametrize("damage", ["truncate", "grow", "delete", "json"])
def test_damaged_entry_is_rebuilt(folder, tmp_path, damage):
    expected = text_of(folder, tmp_path)
    data, facts = (next((tmp_path / "tokens").glob(f"*.{suffix}")) for suffix in ("bin", "json"))
    if damage == "truncate":
        os.truncate(data, 3)
    elif damage == "grow":
        data.write_bytes(data.read_bytes() + b"?")
    elif damage == "delete":
        data.unlink()
    else:
        facts.write_text(facts.read_text()[:20])
    assert text_of(folder, tmp_path) == expected
    assert len(list((tmp_path / "tokens").iterdir())) == 2  # nothing left beside the entry


def test_failed_conversion_leaves_nothing(folder, tmp_path, monkeypatch):
    def fail(file):
        yield b"half"
        raise OSError("disk on fire")

    with monkeypatch.context() as patch:
        patch.setattr(text_sources, "file_blocks", fail)
        with pytest.raises(TextError, match="disk on fire"):
            tokens_of(folder, tmp_path)
    assert not list((tmp_path / "tokens").iterdir())
    assert text_of(folder, tmp_path).startswith("bravo")


def test_text_that_changes_while_it_is_read_is_refused(folder, tmp_path, monkeypatch):
    def change(text):
        (folder / "z.txt").write_text("longer than before")
        return text.rfind(b"\n") + 1

    monkeypatch.setattr(text_sources, "_CHUNK", 1)
    monkeypatch.setattr(text_sources, "_cut", change)
    with pytest.raises(TextError, match=r"z\.txt changed while it was being read"):
        tokens_of(folder, tmp_path)


def test_two_processes_convert_at_once(tmp_path):
    (tmp_path / "big.txt").write_text("0123456789\n" * 500_000)
    code = """
import hashlib, pathlib, sys, time
from raypar.actors.data.text.text_files import open_tokens
assert "torch" not in sys.modules, "the driver must not need torch"
here = pathlib.Path(sys.argv[1])
(here / f"ready{sys.argv[2]}").touch()
while len(list(here.glob("ready*"))) < 2:
    time.sleep(0.001)
tokens, facts = open_tokens("path", str(here / "big.txt"), None, str(here / "cache"))
assert hashlib.sha256(tokens).hexdigest() == facts.sha256
print(facts.count, facts.fingerprint)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    both = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(2)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0] == said[1] and said[0].startswith("5500000 ")
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 2


def test_tokenizer_round_trip(folder, tmp_path, bpe):
    tokens, facts = tokens_of(folder, tmp_path, bpe)
    model = tokenizers.Tokenizer.from_file(str(bpe))
    assert tokens.dtype == np.uint16 and facts.vocab == model.get_vocab_size() == 300
    assert facts.max_id == tokens.max() < 300
    assert model.decode(tokens.tolist()) == "bravo\nalpha\nzulu"


def test_tokenizer_that_truncates_pads_and_adds_tokens_does_none_of_it(tmp_path, bpe):
    model = tokenizers.Tokenizer.from_file(str(bpe))
    model.enable_truncation(4)
    model.enable_padding(length=1000)
    model.post_processor = tokenizers.processors.TemplateProcessing("the $A", special_tokens=[("the", 299)])
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text("the rain in spain " * 9)
    tokens, _ = tokens_of(tmp_path / "text", tmp_path, tmp_path / "tokenizer.json")
    assert model.decode(tokens.tolist()) == "the rain in spain " * 9


def test_large_tokenizer_gives_uint32(tmp_path):
    words = {f"w{i}": i for i in range(70_000)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text("w5 w69999 w1")
    tokens, facts = tokens_of(tmp_path / "text", tmp_path, tmp_path / "tokenizer.json")
    assert tokens.dtype == np.uint32 and tokens.tolist() == [5, 69999, 1] and facts.vocab == 70_000


@pytest.mark.parametrize(
    "text", ["one two\n" * 40, "one two " * 40, "日本語" * 40, "é" * 41, "x" * 99, "a\n" + "語" * 30]
)
@pytest.mark.parametrize("chunk", [7, 16, 1000])
def test_chunks_lose_nothing_and_split_no_character(tmp_path, monkeypatch, bpe, text, chunk):
    monkeypatch.setattr(text_sources, "_CHUNK", chunk)
    (tmp_path / "text").write_text(text)
    assert text_of(tmp_path / "text", tmp_path) == text
    tokens, _ = tokens_of(tmp_path / "text", tmp_path, bpe)
    assert tokenizers.Tokenizer.from_file(str(bpe)).decode(tokens.tolist()) == text


def test_bin_is_mapped_in_place(tmp_path):
    ids = np.array([3, 50256, 7, 0], "<u2")
    ids.tofile(tmp_path / "train.bin")
    tokens, facts = tokens_of(tmp_path / "train.bin", tmp_path / "cache")
    assert tokens.dtype == np.uint16 and tokens.tolist() == ids.tolist()
    assert Path(tokens.filename) == tmp_path / "train.bin"
    assert (facts.vocab, facts.max_id, facts.count) == (50257, 50256, 4)
    assert not list((tmp_path / "cache" / "tokens").glob("*.bin"))
    ids[1] = 9
    ids.tofile(tmp_path / "train.bin")
    os.utime(tmp_path / "train.bin", (1, 1))
    changed = tokens_of(tmp_path / "train.bin", tmp_path / "cache")[1]
    assert changed.max_id == 9 and changed.fingerprint != facts.fingerprint


def test_cache_folder_follows_the_environment(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    open_tokens("path", str(folder), None, None)
    assert list((tmp_path / "xdg" / "raypar" / "tokens").glob("*.bin"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    open_tokens("path", str(folder), None, None)
    assert list((tmp_path / "home" / ".cache" / "raypar" / "tokens").glob("*.bin"))


def test_a_device_is_no_missing_file():
    assert [*text_faults(Text("/dev/zero"), 8, 256)] == [
        "path: '/dev/zero' cannot be read (it is no plain file): correct the path"
    ]
