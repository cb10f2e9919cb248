"""Batches as pure functions, and the faults of the user's text."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypar.actors.data.text.stretches import Stretches, TokenWindows, drawn_blocks
from raypar.actors.data.text.token_batches import Corpus, TokenBatches, _mix, open_corpus, shuffled, text_faults
from raypar.actors.specs.data import Text


def numbers(train=1001, val=101):
    """A corpus whose tokens say where they are; validation goes on where training ends."""
    ids = np.arange(train + val, dtype=np.uint16)
    return Corpus(
        Stretches.whole(ids[:train]), Stretches.whole(ids[train:]), vocab=len(ids), max_id=len(ids) - 1, fingerprint=""
    )


def order(size, epoch=0, seed=0):
    return shuffled(np.arange(size), np.full(size, epoch), size, seed)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").write_text("abcdefghij" * 100)
    return Text(path=str(tmp_path / "text"), cache=str(tmp_path / "cache"))


@given(size=st.integers(1, 3000), epoch=st.integers(0, 10**6), seed=st.integers(-(2**63), 2**64))
def test_every_window_once_an_epoch(size, epoch, seed):
    assert np.array_equal(np.sort(order(size, epoch, seed)), np.arange(size))


def test_the_hash_of_an_order_is_that_of_splitmix64():
    """Java's SplittableRandom, seeds 0 and 1234567: each state is the one before plus the golden ratio."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        from_0 = _mix(np.arange(3, dtype=np.uint64) * golden)
        other = _mix(np.uint64(1234567) + np.arange(3, dtype=np.uint64) * golden)
    assert from_0.tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert other.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize(("size", "epoch", "seed"), [(1, 0, 0), (10, 0, 0), (97, 3, 5), (1000, 2, 2**63 + 1)])
def test_an_order_is_that_of_a_network_in_plain_numbers(size, epoch, seed):
    """Which a run that is resumed with a later version needs, too."""

    def mix(number):
        number = (number + 0x9E3779B97F4A7C15) % 2**64
        number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        number = ((number ^ number >> 27) * 0x94D049BB133111EB) % 2**64
        return number ^ number >> 31

    high = math.isqrt(size - 1) + 1
    wide = -(-size // high)
    key = mix(mix(seed) ^ epoch)
    keys = [mix((key + number) % 2**64) for number in range(8)]

    def once(place):
        left, right = divmod(place, wide)
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            left = (left + mix(right ^ even)) % 2**64 % high
            right = (right + mix(left ^ odd)) % 2**64 % wide
        return left * wide + right

    wanted = []
    for place in range(size):
        place = once(place)
        while place >= size:
            place = once(place)
        wanted.append(place)
    assert order(size, epoch, seed).tolist() == wanted


def test_huge_epochs_need_no_table():
    places = shuffled(np.arange(1000), np.zeros(1000, np.int64), 10**15, 0)
    assert len(set(places.tolist())) == 1000 and places.min() >= 0 and places.max() < 10**15
    assert 0.45 < places.mean() / 10**15 < 0.55


@pytest.mark.parametrize("size", [2, 12, 30])
@pytest.mark.parametrize("other", [1, -1])
def test_every_two_windows_meet_at_two_places_equally_often(size, other):
    pairs = size * (size - 1)
    epochs = 60 * pairs
    position = np.tile([0, other % size], epochs)
    first, second = shuffled(position, np.repeat(np.arange(epochs), 2), size, seed=1).reshape(epochs, 2).T
    counts = np.bincount(first * size + second, minlength=size**2).reshape(size, size)[~np.eye(size, dtype=bool)]
    freedom = pairs - 1
    chi_square = float(((counts - 60) ** 2 / 60).sum())
    assert counts.sum() == epochs and abs(chi_square - freedom) < 6 * (2 * freedom) ** 0.5


def test_neighbours_and_epochs_and_seeds_are_unrelated():
    size = 10_000
    first = order(size)
    assert np.sum(np.diff(first) == 1) < 10  # 1 expected
    assert np.sum(first == order(size, epoch=1)) < 10
    assert np.sum(first == order(size, seed=1)) < 10
    assert abs(np.corrcoef(first, np.arange(size))[0, 1]) < 0.05


def test_shapes_types_and_labels():
    batches = TokenBatches(numbers(), seq=10, micro_batch_size=3, microbatches=4, num_dp=2, seed=5)
    for program in ("train", "evaluate"):
        x, y = batches.tokens(program, 7, 3, 1), batches.labels(program, 7, 3, 1)
        assert x.shape == y.shape == (3, 10) and x.dtype == y.dtype == torch.int64
        assert torch.equal(y, x + 1)  # token k of this corpus is k


def test_same_arguments_same_batch_other_seed_other_batch():
    make = [TokenBatches(numbers(), 10, 2, 4, 1, seed) for seed in (3, 3, 4)]
    make[0].tokens("train", 9, 1)
    a, b, c = (batches.tokens("train", 2, 1) for batches in make)
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_an_epoch_of_batches_holds_every_window_once():
    batches = TokenBatches(numbers(train=1009), seq=10, micro_batch_size=5, microbatches=2, num_dp=2)
    epochs = []
    for epoch in range(2):
        steps = range(epoch * 5, epoch * 5 + 5)
        starts = [batches.tokens("train", s, m, d)[:, 0] for s in steps for m in range(2) for d in range(2)]
        epochs.append(torch.cat(starts))
        assert torch.equal(torch.sort(epochs[-1]).values, torch.arange(0, 1000, 10))
    assert not torch.equal(*epochs)


def test_a_batch_may_lie_across_two_epochs():
    batches = TokenBatches(numbers(train=71), seq=10, micro_batch_size=5, microbatches=1)
    starts = torch.cat([batches.tokens("train", step, 0)[:, 0] for step in range(7)])  # 35 samples, 5 epochs of 7
    for epoch in starts.split(7):
        assert torch.equal(torch.sort(epoch).values, torch.arange(0, 70, 10))


@pytest.mark.parametrize(("microbatches", "num_dp"), [(8, 1), (4, 2), (2, 4), (1, 8)])
@pytest.mark.parametrize("program", ["train", "evaluate"])
def test_a_step_takes_the_same_samples_however_they_are_divided(microbatches, num_dp, program):
    def step(m, d):
        batches = TokenBatches(numbers(), 10, 2, m, d)
        return torch.cat([batches.tokens(program, 3, i, j) for i in range(m) for j in range(d)])

    assert torch.equal(step(microbatches, num_dp), step(8, 1))


def test_validation_is_in_order_and_starts_again():
    batches = TokenBatches(numbers(train=100, val=36), seq=5, micro_batch_size=2, microbatches=2)
    starts = torch.cat([batches.tokens("evaluate", step, m)[:, 0] for step in range(3) for m in range(2)])
    assert (starts - 100).tolist() == [0, 5, 10, 15, 20, 25, 30, 0, 5, 10, 15, 20]


def test_training_never_sees_validation():
    batches = TokenBatches(numbers(train=101, val=51), seq=10, micro_batch_size=10, microbatches=1)
    assert max(int(batches.labels("train", step, 0).max()) for step in range(5)) == 100
    assert min(int(batches.tokens("evaluate", step, 0).min()) for step in range(5)) == 101


@pytest.mark.parametrize("place", [(-1, 0, 0), (0, 2, 0), (0, -1, 0), (0, 0, 2), (0, 0, -1)])
def test_a_place_outside_of_the_job_is_refused(place):
    batches = TokenBatches(numbers(), 10, 2, microbatches=2, num_dp=2)
    for read in (batches.tokens, batches.labels):
        for program in ("train", "evaluate"):
            with pytest.raises(ValueError, match="outside"):
                read(program, *place)


@pytest.mark.parametrize(("train", "val", "name"), [(10, 100, "training"), (100, 10, "validation")])
def test_no_window_no_batches(train, val, name):
    with pytest.raises(ValueError, match=f"{name} data: 10 tokens"):
        TokenBatches(numbers(train, val), 10, 1, 1)
    TokenBatches(numbers(11, 11), 10, 1, 1)


def seconds_of_a_batch(tokens, seq):
    """Return the least seconds in which a batch is read, of a corpus of so many tokens."""
    ids = np.random.default_rng(0).integers(0, 256, tokens, np.uint8)
    corpus = Corpus(Stretches.whole(ids), Stretches.whole(ids), 256, 255, "")
    batches = TokenBatches(corpus, seq=seq, micro_batch_size=2, microbatches=8, num_dp=2)
    batches.tokens("train", 0, 0)
    best = float("inf")
    for step in range(200):
        start = time.perf_counter()
        batches.tokens("train", step, 1, 1), batches.labels("train", step, 1, 1)
        best = min(best, time.perf_counter() - start)
    return best


def test_reading_a_batch_costs_little():
    few, many = seconds_of_a_batch(10_000, 8), seconds_of_a_batch(10_000_000, 256)
    assert many < 3 * few, "an index of all windows takes longer"


def test_validation_from_the_end_has_the_last_tokens(text):
    corpus = open_corpus(replace(text, val_from="end"), 4)
    assert len(corpus.train) == 900 and len(corpus.val) == 100
    assert bytes(corpus.train.tokens) + bytes(corpus.val.tokens) == Path(text.path).read_bytes()
    assert corpus.vocab == 256 and corpus.max_id == ord("j") and not corpus.val.tokens.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        corpus.train.tokens[0] = 0


def test_blocks_for_validation_are_drawn_over_all_of_a_text(text):
    corpus = open_corpus(text, 4)
    assert (len(corpus.train), len(corpus.val), len(corpus.val.firsts)) == (900, 100, 5)
    assert [*corpus.val.firsts // 200] == [*range(5)], "one in each fifth"
    other = open_corpus(replace(text, val_from="end"), 4)
    assert corpus.fingerprint != other.fingerprint


@given(tokens=st.integers(20, 5000), share=st.floats(0.01, 0.99), seq=st.integers(1, 60))
def test_training_and_validation_share_no_token_and_each_has_a_window(tokens, share, seq):
    held = int(tokens * share)
    if held < seq + 1 or tokens - held < seq + 1:
        return  # such a text is refused
    train, val = drawn_blocks(np.arange(tokens), share, seq, lambda numbers: (numbers + 3) ** 7 * 12345677)
    places = [
        place
        for part in (train, val)
        for first, length in zip(part.firsts, part.lengths, strict=True)
        for place in range(first, first + length)
    ]
    assert sorted(places) == [*range(tokens)]
    assert held - len(val.firsts) < len(val) <= held
    assert len(set(val.lengths.tolist())) == 1
    for part, across in ((train, False), (val, True)):
        windows = TokenWindows(part, seq, across=across)
        assert len(windows) == sum((length - 1) // seq for length in part.lengths.tolist()) > 0
        starts = windows.starts(np.arange(len(windows)))
        assert len(set(starts.tolist())) == len(windows)
        for start in starts.tolist():
            ends = part.firsts + part.lengths
            assert any(first <= start and start + seq < end for first, end in zip(part.firsts, ends, strict=True))
        one_each = starts[: len(part.firsts)]
        if across:
            assert one_each.tolist() == part.firsts.tolist(), "the first windows are one of each block"


def test_val_path_is_the_validation_text(text, tmp_path):
    (tmp_path / "val").write_text("xyz")
    both = Text(path=text.path, val_path=str(tmp_path / "val"), val_fraction=0.0, cache=text.cache)
    corpus = open_corpus(both, 4)
    assert len(corpus.train) == 1000 and bytes(corpus.val.tokens) == b"xyz" and corpus.max_id == ord("z")
    halves = Text(path=text.path, val_fraction=0.5, cache=text.cache)
    assert len({corpus.fingerprint, open_corpus(text, 4).fingerprint, open_corpus(halves, 4).fingerprint}) == 3


def test_stdlib_batches_are_python(tmp_path):
    corpus = open_corpus(Text(cache=str(tmp_path)), 256)
    assert len(corpus.train) > 9 * len(corpus.val) - 9 > 1_000_000
    sample = TokenBatches(corpus, 256, 8, 1).tokens("train", 0, 0)
    assert " " in bytes(sample.flatten().tolist()).decode(errors="replace")
    assert text_faults(Text(cache=str(tmp_path)), 256, 256) == []


def only_fault(text, seq=10, vocab=256):
    (fault,) = text_faults(text, seq, vocab)
    return fault


@pytest.mark.parametrize("path", ["/no/such/file", "", "no\0name", "/etc/passwd/x", "x" * 5000, "~nobodyhere/x"])
def test_fault_path(path, tmp_path):
    assert "correct the path" in only_fault(Text(path=path, cache=str(tmp_path)))


def test_fault_glob_matches_nothing(tmp_path):
    assert "matches no file" in only_fault(Text(path=f"{tmp_path}/*.txt", cache=str(tmp_path)))
    (tmp_path / "a.bin").write_bytes(b"ab")
    assert "named by its own path" in only_fault(Text(path=f"{tmp_path}/*.bin", cache=str(tmp_path)))


def test_fault_empty(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "binaries").mkdir()
    (tmp_path / "binaries" / "a").write_bytes(b"\0\0")
    (tmp_path / "empty.bin").touch()
    for name in ("empty", "folder", "binaries", "empty.bin"):
        for _ in range(2):  # what is in the cache by the second time must not hide it
            assert "is empty" in only_fault(Text(path=str(tmp_path / name), cache=str(tmp_path / "cache")))


def test_fault_unreadable(text, monkeypatch):
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "text" and allowed(path, mode))
    assert "no permission to read text" in only_fault(text)


def test_fault_unreadable_folder(text, tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    assert "Permission denied" in only_fault(Text(path=str(tmp_path), cache=text.cache))


def test_fault_tokenizer(text, tmp_path, monkeypatch):
    def with_tokenizer(name):
        return Text(path=text.path, tokenizer=str(tmp_path / name), cache=text.cache)

    assert "missing.json' cannot be read (No such file or directory): correct" in only_fault(
        with_tokenizer("missing.json")
    )
    for content in ("not json", "{}", '{"model": 3}'):
        (tmp_path / "tokenizer.json").write_text(content)
        assert "not a tokenizers JSON file" in only_fault(with_tokenizer("tokenizer.json"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install tokenizers" in only_fault(with_tokenizer("tokenizer.json"))


def test_fault_tokenizer_without_the_words(text, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="?")).save(str(tmp_path / "t.json"))
    assert "the tokenizer fails" in only_fault(
        Text(path=text.path, tokenizer=str(tmp_path / "t.json"), cache=text.cache)
    )


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 10, float("nan")])
def test_fault_val_fraction(text, fraction):
    assert only_fault(Text(path=text.path, val_fraction=fraction, cache=text.cache)).startswith("val_fraction")


def test_fault_odd_bin(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"abc" * 101)
    assert "odd size, 303 bytes" in only_fault(Text(path=str(tmp_path / "odd.bin"), cache=str(tmp_path)))


def test_fault_ids_and_vocab(text, tmp_path):
    assert text_faults(text, 10, ord("j") + 1) == []
    fault = only_fault(text, vocab=ord("j"))
    assert "largest token id is 106" in fault and "model.vocab is 106" in fault and "set model.vocab to 256" in fault
    np.arange(1000, dtype="<u2").tofile(tmp_path / "ids.bin")
    assert "set model.vocab to 1000" in only_fault(Text(path=str(tmp_path / "ids.bin"), cache=text.cache), vocab=999)


def test_fault_too_few_tokens(text, tmp_path):
    assert text_faults(text, 99, 256) == []
    few = "tokens for {}, fewer than one window of model.seq + 1 = {}: "
    assert only_fault(text, seq=100) == (
        f"val_fraction: 0.1 leaves 100 of 1000 {few.format('validation', 101)}"
        "set it to 0.11, or give more text, or set model.seq to 99"
    )
    assert text_faults(replace(text, val_fraction=0.11), 100, 256) == []
    assert text_faults(text, 99, 256) == []
    assert only_fault(text, seq=900) == (
        f"val_fraction: 0.1 leaves 100 of 1000 {few.format('validation', 901)}give more text, or set model.seq to 99"
    )
    assert "0.95 leaves 50 of 1000 tokens for training" in only_fault(replace(text, val_fraction=0.95), seq=200)
    Path(tmp_path / "one.txt").write_text("a")
    both = replace(text, path=text.path, val_path=str(tmp_path / "one.txt"))
    assert only_fault(both, seq=10) == (
        "val_path: 1 token, fewer than one window of model.seq + 1 = 11: give more text"
    )


def test_fault_cache(text, tmp_path, monkeypatch):
    assert only_fault(Text(path=text.path, cache=f"{text.path}/below")).startswith("cache")
    filled = open_corpus(text, 4)
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)
    assert open_corpus(text, 4).fingerprint == filled.fingerprint  # a filled cache may be read-only
    assert only_fault(Text(path=text.path, cache=str(tmp_path / "other"))).startswith("cache")


def test_fault_bytes_and_ids(text, tmp_path):
    np.arange(100, dtype="<u2").tofile(tmp_path / "ids.bin")
    assert "two of a kind" in only_fault(Text(path=text.path, val_path=str(tmp_path / "ids.bin"), cache=text.cache))


def test_all_faults_at_once(text, tmp_path):
    everything = Text(
        path="/no/train", val_path="/no/val/*.txt", tokenizer="/no/tokenizer.json", cache=f"{text.path}/below"
    )
    starts = [fault.split(":")[0] for fault in text_faults(everything, 10, 256)]
    assert sorted(starts) == ["cache", "path", "tokenizer", "val_path"]
    with pytest.raises(ValueError, match=r"/no/train(.|\n)*/no/val") as error:
        open_corpus(everything, 4)
    assert "\n- cache:" in str(error.value) and "\n- tokenizer:" in str(error.value)

    (tmp_path / "short").write_text("zz")
    readable = Text(path=text.path, val_path=str(tmp_path / "short"), cache=text.cache)
    starts = [fault.split(":")[0] for fault in text_faults(readable, 5000, 100)]
    assert starts == ["path", "val_path", "path", "val_path"]
    starts = [f.split(":")[0] for f in text_faults(Text(path=text.path, val_fraction=2, cache=text.cache), 10, 100)]
    assert starts == ["val_fraction", "path"]
