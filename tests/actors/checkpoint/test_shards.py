"""Shards and slices: what was written is read back, bit for bit, whatever its type, strides and layout."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypar.actors.checkpoint.assembler import Assembler, ShardFolder
from raypar.actors.checkpoint.logical import DTYPES, Logical, Stored
from raypar.actors.checkpoint.shards import (
    ShardFile,
    is_plain,
    read_header,
    read_shard,
    stored_in,
    write_shard,
)
from raypar.actors.errors import CheckpointError
from raypar.actors.machine import files as disk
from raypar.actors.sharding import Pieces, Shard, Sharding


def bits(tensor):
    return tensor.dtype, tuple(tensor.shape), bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def noise(dtype, *shape):
    """A tensor of random bits, NaNs of every kind among them; a bool has two values only."""
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(name, tmp_path):
    dtype = getattr(torch, name)
    shapes = [(), (1,), (0,), (3, 0, 2), (5,), (3, 4, 7)]
    tensors = {f"t{index}": noise(dtype, *shape) for index, shape in enumerate(shapes)}
    write_shard(tmp_path, "a.safetensors", tensors)
    for read in (read_shard(tmp_path, "a.safetensors"), safetensors.torch.load_file(tmp_path / "a.safetensors")):
        assert {key: bits(tensor) for key, tensor in read.items()} == {key: bits(t) for key, t in tensors.items()}
    header = read_header(tmp_path, "a.safetensors")
    assert header == {key: (DTYPES[name], tuple(tensor.shape)) for key, tensor in tensors.items()}


def test_views_are_written_as_what_they_show(tmp_path):
    base = noise(torch.float32, 6, 8)
    views = {
        "transposed": base.T,
        "every other": base[::2, 1::3],
        "expanded": base[:, :1].expand(6, 5),
        "negated": torch._neg_view(base),
        "conjugate": noise(torch.complex64, 4).conj(),
        "trained": torch.nn.Parameter(torch.ones(2, 2)),
        "of mixed sizes": noise(torch.bfloat16, 3),
        "ö \u2028": torch.tensor(True),
    }
    write_shard(tmp_path, "a", views)
    read = read_shard(tmp_path, "a")
    assert read.keys() == views.keys()
    for name, view in views.items():
        assert bits(read[name]) == bits(view.detach().clone().resolve_conj().resolve_neg()), name


def test_a_shard_says_its_size_and_digest_and_leaves_nothing_beside_it(tmp_path):
    tensors = {"big": noise(torch.float32, 700, 1000), "none": torch.empty(0)}  # of more than one piece
    shard = write_shard(tmp_path, "pp0.safetensors", tensors)
    raw = (tmp_path / "pp0.safetensors").read_bytes()
    assert shard == ShardFile("pp0.safetensors", len(raw), hashlib.sha256(raw).hexdigest())
    assert names_in(tmp_path) == ["pp0.safetensors"]
    write_shard(tmp_path, "empty", {})
    assert read_shard(tmp_path, "empty") == {}


def test_only_what_is_asked_for_is_read(tmp_path):
    write_shard(tmp_path, "a", {"x": torch.ones(3), "y": torch.zeros(2)})
    assert read_shard(tmp_path, "a", ["y"]).keys() == {"y"}
    with pytest.raises(CheckpointError, match="nowhere"):
        read_shard(tmp_path, "a", ["nowhere"])


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse(), torch.ones(2, device="meta")]
)
def test_a_tensor_that_no_shard_can_hold_is_told_by_name(tensor, tmp_path):
    with pytest.raises(CheckpointError, match=r"'odd' is a .* tensor of"):
        write_shard(tmp_path, "a", {"fine": torch.ones(1), "odd": tensor})
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "../x", "/x", "a/b", "a\0b", "a\n", "ä", "a" * 101, "-rf"])
def test_names_that_are_not_plain_are_refused(name, tmp_path):
    assert not is_plain(name)
    for use in (lambda: write_shard(tmp_path, name, {}), lambda: read_shard(tmp_path, name)):
        with pytest.raises(CheckpointError, match="no name for a shard"):
            use()
    assert list(tmp_path.rglob("*")) == []


def test_links_pipes_and_folders_are_not_read(tmp_path):
    write_shard(tmp_path, "real", {"x": torch.ones(3)})
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "device").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "device", "pipe", "folder"):
        with pytest.raises(CheckpointError, match="no plain file"):
            read_shard(tmp_path, name)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}, b""),
        ({"x": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 0]}}, b""),
        ({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"12"),
        ({"x": {"dtype": "U8", "shape": [1], "data_offsets": [5, 6]}}, b"1"),
        ({"x": {"dtype": "code", "shape": [1], "data_offsets": [0, 1]}}, b"1"),
        ([[[[1]]]], b""),
        (None, b"x" * 100),
    ],
)
def test_a_crafted_header_is_refused(header, data, tmp_path):
    text = json.dumps(header).encode()
    length = 1 << 60 if header is None else len(text)
    (tmp_path / "a").write_bytes(length.to_bytes(8, "little") + text + data)
    for read in (read_shard, read_header):
        with pytest.raises(CheckpointError, match="'a' can't be read as safetensors"):
            read(tmp_path, "a")


def test_what_the_disk_refuses_is_told_with_the_fix(tmp_path, monkeypatch):
    def full(fd, data):
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"No such file.*give a path that is there, and that every node sees"):
        write_shard(tmp_path / "gone", "a", {})
    monkeypatch.setattr(disk.os, "write", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*: free some space"):
        write_shard(tmp_path, "a", {"x": torch.ones(3)})
    assert names_in(tmp_path) == []


def test_short_writes_are_gone_on_with(tmp_path, monkeypatch):
    write, tensors = os.write, {"x": noise(torch.float32, 1000)}
    monkeypatch.setattr(disk.os, "write", lambda fd, data: write(fd, data[:97]))
    shard = write_shard(tmp_path, "a", tensors)
    assert shard.sha256 == disk.sha256_of(tmp_path / "a")
    assert bits(read_shard(tmp_path, "a")["x"]) == bits(tensors["x"])


# --- slices ----------------------------------------------------------------------------------------------------------


@st.composite
def boxes(draw, depth=5):
    """A shape, and boxes (offset, shape) that tile it, in some order."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    todo, done = [((0,) * len(shape), shape)], []
    while todo:
        offset, size = todo.pop()
        wide = [dim for dim, extent in enumerate(size) if extent > 1]
        if not wide or len(todo) + len(done) >= depth or draw(st.booleans()):
            done.append((offset, size))
            continue
        dim = draw(st.sampled_from(wide))
        cut = draw(st.integers(1, size[dim] - 1))
        upper = tuple(o + cut * (d == dim) for d, o in enumerate(offset))
        todo.append((offset, tuple(cut if d == dim else e for d, e in enumerate(size))))
        todo.append((upper, tuple(e - cut * (d == dim) for d, e in enumerate(size))))
    return shape, draw(st.permutations(done))


def logical_of(shape, parts, dtype="F32"):
    return Logical(dtype, shape, tuple(Stored("a", f"k{i}", offset, size) for i, (offset, size) in enumerate(parts)))


def tiles(shape, parts):
    """By counting how often each element is taken."""
    count = np.zeros(shape, int)
    for offset, size in parts:
        if len(offset) != len(shape) or len(size) != len(shape):
            return False
        if any(o + s > extent for o, s, extent in zip(offset, size, shape, strict=True)):
            return False
        count[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] += 1
    return bool((count == 1).all()) and bool(parts)


@given(boxes())
def test_boxes_that_tile_have_no_faults(drawn):
    assert tiles(*drawn)
    assert list(logical_of(*drawn).faults()) == []


@given(boxes(), st.data())
def test_the_verdict_on_any_boxes_is_that_of_counting(drawn, data):
    shape, parts = drawn
    parts = list(parts)
    number = st.integers(0, 6)
    for _ in range(data.draw(st.integers(0, 2))):
        which = data.draw(st.integers(0, len(parts) - 1)) if parts else 0
        kind = data.draw(st.sampled_from(["drop", "double", "move", "size", "dims"])) if parts else "none"
        if kind == "drop":
            parts.pop(which)
        elif kind == "double":
            parts.append(parts[which])
        elif kind == "dims":
            parts[which] = (parts[which][0], (*parts[which][1], 1))
        elif kind != "none":
            new = data.draw(st.tuples(*[number] * len(shape)))
            parts[which] = (new, parts[which][1]) if kind == "move" else (parts[which][0], new)
    assert bool(list(logical_of(shape, parts).faults())) == (not tiles(shape, parts))


def test_every_slice_that_is_wrong_is_named():
    parts = [((0, 0), (2, 2)), ((1, 1), (2, 2)), ((3, 3), (2, 1)), ((0,), (1,))]
    faults = list(logical_of((4, 4), parts).faults())
    assert [fault for fault in faults if "leaves" in fault and ("'k2'" in fault or "'k3'" in fault)] == faults[:2]
    assert faults[2:] == ["'k0' of 'a' and 'k1' of 'a' overlap", "8 of its 16 elements are in no slice"]
    assert list(logical_of((3,), [((0,), (2,))]).faults()) == ["1 of its 3 elements are in no slice"]


@pytest.mark.parametrize(
    ("shape", "parts", "dtype"),
    [
        ((1 << 40, 1 << 40), [((0, 0), (1 << 40, 1 << 40))], "F32"),
        ((0, *[1 << 20] * 4), [((0,) * 5, (0, *[1 << 20] * 4))], "F32"),
        ((1,) * 65, [((0,) * 65, (1,) * 65)], "F32"),
        ((70000,), [((i,), (1,)) for i in range(70000)], "F32"),
        ((2,), [((0,), (2,))], "F4"),
    ],
)
def test_shapes_counts_and_dtypes_have_bounds(shape, parts, dtype):
    assert len(list(logical_of(shape, parts, dtype).faults())) == 1


@given(boxes(), st.integers(1, 3))
def test_a_tensor_is_put_together_from_any_slices_in_any_files(drawn, num_files):
    shape, parts = drawn
    whole = noise(torch.bfloat16, *shape)
    stored = [Stored(f"f{i % num_files}", f"k{i}", offset, size) for i, (offset, size) in enumerate(parts)]
    with tempfile.TemporaryDirectory() as name:
        for file in {one.file for one in stored}:
            write_shard(Path(name), file, {one.key: whole[index_of(one)] for one in stored if one.file == file})
        read = Assembler(ShardFolder(Path(name))).read(Logical("BF16", shape, tuple(stored)))
        assert bits(read) == bits(whole)


def test_slices_that_are_not_in_the_files_are_refused(tmp_path):
    write_shard(tmp_path, "a", {"k0": torch.ones(2), "k1": torch.ones(2, dtype=torch.int32)})
    twice = Logical("F32", (4,), (Stored("a", "k0", (0,), (2,)), Stored("a", "k0", (2,), (2,))))
    mixed = Logical("F32", (4,), (Stored("a", "k0", (0,), (2,)), Stored("a", "k1", (2,), (2,))))
    larger = Logical("F32", (1 << 40,), (Stored("a", "k0", (0,), (1 << 40,)),))
    for logical, says in ((twice, "several slices"), (mixed, "k1' of 'a' is I32"), (larger, r"\[2\], not F32 \[1099")):
        with pytest.raises(CheckpointError, match=says):
            Assembler(ShardFolder(tmp_path)).read(logical)


def test_only_what_is_read_must_be_there_and_once(tmp_path):
    write_shard(tmp_path, "a", {"k": torch.arange(4.0)})
    first, gone, twice = (Stored(file, "k", (start,), (4,)) for file, start in (("a", 0), ("b", 4), ("c", 2)))

    def read(half, *slices):
        return Assembler(ShardFolder(tmp_path)).read(Logical("F32", (8,), slices), Sharding({0: half})).tolist()

    assert read(Pieces.at(0, 2), first, gone) == read(Pieces.at(0, 2), first) == [0, 1, 2, 3]
    assert read(Pieces(4, (1, 0)), first) == [2, 3, 0, 1]
    for says, half, slices in (
        ("3 of its 4 elements are in no slice", Pieces.at(1, 2), [Stored("a", "k", (1,), (4,))]),
        ("'b' can't be read", Pieces.at(1, 2), [first, gone]),
        ("'k' of 'a' and 'k' of 'c' overlap", Pieces.at(0, 2), [first, twice]),
    ):
        with pytest.raises(CheckpointError, match=says):
            read(half, *slices)


@given(boxes(), st.data())
def test_an_actor_reads_its_part_and_no_more(drawn, data):
    shape, parts = drawn
    whole = noise(torch.bfloat16, *shape)
    stored = [Stored("f", f"k{i}", offset, size) for i, (offset, size) in enumerate(parts)]
    dims = {dim: data.draw(st.sampled_from(pieces_of(length))) for dim, length in enumerate(shape)}
    own = Sharding({dim: pieces for dim, pieces in dims.items() if pieces is not None})
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr("raypar.actors.checkpoint.assembler.AT_ONCE", data.draw(st.sampled_from([1, 8, 1 << 20])))
        write_shard(Path(name), "f", {one.key: whole[index_of(one)] for one in stored})
        read = Assembler(ShardFolder(Path(name))).read(Logical("BF16", shape, tuple(stored)), own)
    assert bits(read) == bits(own.take(whole))


def index_of(stored):
    """The index of a slice in the logical tensor."""
    return tuple(slice(start, start + size) for start, size in zip(stored.offset, stored.shape, strict=True))


def pieces_of(length):
    """Ways to hold pieces of a dim: all, the first or the last of some, and three with gaps, where these are equal."""
    found = [None, Pieces.at(0, 2), Pieces.at(2, 3)]
    return found + [Pieces(6, (0, 2, 4)), Pieces(6, (4, 1))] * (length % 6 == 0)


def test_reading_a_part_takes_no_memory_for_the_whole(tmp_path):
    write_shard(tmp_path, "a", {"k": torch.zeros(3 << 20)})
    logical = Logical("F32", (3 << 20,), (Stored("a", "k", (0,), (3 << 20,)),))
    held = []
    with pytest.MonkeyPatch.context() as patch:
        made = torch.empty
        patch.setattr(torch, "empty", lambda *size, **words: held.append(made(*size, **words)) or held[-1])
        part = Assembler(ShardFolder(tmp_path)).read(logical, Sharding({0: Pieces.at(1, 48)}))
    assert sum(one.nbytes for one in held) == 2 * part.nbytes == 2 * 4 * (3 << 20) // 48


def test_a_file_that_got_shorter_since_its_header_was_read_is_told(tmp_path):
    write_shard(tmp_path, "a", {"k": torch.ones(300)})
    assembler, logical = Assembler(ShardFolder(tmp_path)), Logical("F32", (300,), (Stored("a", "k", (0,), (300,)),))
    assembler.read(logical)
    os.truncate(tmp_path / "a", 900)
    with pytest.raises(CheckpointError, match="'k' of 'a' can't be read: the file is shorter than its header says"):
        assembler.read(logical)


def test_what_is_assembled_outlives_its_file(tmp_path):
    write_shard(tmp_path, "a", {"k": torch.ones(3)})
    read = Assembler(ShardFolder(tmp_path)).read(Logical("F32", (3,), (Stored("a", "k", (0,), (3,)),)))
    (tmp_path / "a").write_bytes(b"")
    assert read.tolist() == [1, 1, 1]


def test_a_slice_is_all_of_a_tensor_unless_told_otherwise():
    part = torch.ones(2, 3, dtype=torch.bfloat16)
    assert stored_in("a", "w", part) == Logical("BF16", (2, 3), (Stored("a", "w", (0, 0), (2, 3)),))
    assert stored_in("a", "w", torch.tensor(1.0)).shape == ()
    lower = Shard((4, 3), Sharding({0: Pieces.at(1, 2)}))
    assert stored_in("a", "w", part, lower) == Logical("BF16", (4, 3), (Stored("a", "w", (2, 0), (2, 3)),))


def test_many_slices_are_checked_in_time_that_grows_with_their_number(monkeypatch):
    """16,384 of them, in a grid: pairs are compared only where the slices do not tile the tensor."""
    compared = []

    def overlaps(slices, dims):
        compared.append(len(slices))
        return iter(())

    monkeypatch.setattr("raypar.actors.checkpoint.logical._overlaps", overlaps)
    grid = [((row * 3, column), (3, 1)) for row in range(128) for column in range(128)]
    assert list(logical_of((384, 128), grid).faults()) == [] and not compared
    assert list(logical_of((384, 128), grid[:-1]).faults()) == ["3 of its 49152 elements are in no slice"]
    assert compared == [128 * 128 - 1]
