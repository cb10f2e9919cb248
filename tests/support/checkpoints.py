"""Small checkpoints, damage to them, and a disk that fails at a moment of one's choice."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import contextmanager

import torch

from raypar.actors.checkpoint.assembler import Assembler, ShardFolder
from raypar.actors.checkpoint.shards import stored_in, write_shard
from raypar.actors.sharding import Pieces, Shard, Sharding
from raypar.checkpoint import Save, manifest_of, save, verified


def tensors(step):
    """Two weights and what an optimizer keeps for one of them, other ones at each step."""
    draw = torch.Generator().manual_seed(step)
    return {
        "w": torch.randn(6, 4, generator=draw),
        "b": torch.randn(5, generator=draw).bfloat16(),
        "optim.b.step": torch.tensor(float(step)),
    }


def rows_of_w(first, count):
    """Some of the six rows of ``w``."""
    return Shard((6, 4), Sharding({0: Pieces(6, tuple(range(first, first + count)))}))


def save_at(folder, step, keep_last=None, run=None):
    """A checkpoint of two shards; the rows of ``w`` are in both. Its run is plain data."""
    all_of = tensors(step)
    parts = {"pp0.safetensors": {"w": (all_of["w"][:4], 0)}, "pp1.safetensors": {"w": (all_of["w"][4:], 4)}}
    with Save(folder, step) as under_way:
        shards = []
        for file, cut in parts.items():
            held = {name: part for name, (part, _) in cut.items()}
            slices = {name: stored_in(file, name, part, rows_of_w(row, len(part))) for name, (part, row) in cut.items()}
            if file.startswith("pp1"):
                held |= {name: tensor for name, tensor in all_of.items() if name != "w"}
                slices |= {name: stored_in(file, name, tensor) for name, tensor in all_of.items() if name != "w"}
            shards.append((write_shard(under_way.path, file, held), slices))
        return under_way.commit(manifest_of(step, 7, run or {"steps": 100, "mesh": {"pp": 2}}, shards), keep_last)


def holds(path, step):
    """Whether a checkpoint is sound and has the tensors of a step, bit for bit."""
    manifest = verified(path)
    read = {name: Assembler(ShardFolder(path)).read(logical) for name, logical in manifest.tensors.items()}
    wanted = tensors(step)
    assert read.keys() == wanted.keys()
    return manifest.step == step and all(
        read[name].dtype == wanted[name].dtype and torch.equal(read[name], wanted[name]) for name in wanted
    )


def visible(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


# --- damage ----------------------------------------------------------------------------------------------------------


def flip(path, draw):
    """Flip one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    path.write_bytes(raw)


def shorten(path, draw):
    """Cut a file anywhere."""
    raw = path.read_bytes()
    path.write_bytes(raw[: draw.randrange(len(raw))])


def misplace(path, other, draw):
    """Lose a file, or put another one in its place: of this checkpoint or of ``other``, a later one."""
    kind = draw.choice(["lose", "swap", "later"])
    if kind == "lose":
        path.unlink()
    elif kind == "later":
        path.write_bytes((other / path.name).read_bytes())
    else:
        beside = draw.choice([file for file in sorted(path.parent.iterdir()) if file != path])
        one, two = path.read_bytes(), beside.read_bytes()
        path.write_bytes(two)
        beside.write_bytes(one)


def sign(plain):
    """A manifest's text with the digest that belongs to it, whatever it says."""
    blank = json.dumps({**plain, "sha256": ""}, ensure_ascii=False).encode()
    return json.dumps({**plain, "sha256": hashlib.sha256(blank).hexdigest()}, ensure_ascii=False).encode()


def forge(path, change):
    """Change a manifest as one who knows the format: ``change(plain data)``, signed again."""
    plain = json.loads((path / "manifest.json").read_bytes())
    change(plain)
    (path / "manifest.json").write_bytes(sign(plain))


def forge_shard(path, name, raw):
    """Put other bytes in a shard's place, with the size and the digest that belong to them."""
    (path / name).write_bytes(raw)

    def relist(plain):
        file = next(file for file in plain["files"] if file["name"] == name)
        file |= {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}

    forge(path, relist)


# --- a disk that fails -----------------------------------------------------------------------------------------------


class KilledError(BaseException):
    """The process is gone: nothing handles this, and nothing reaches the disk any more."""


@contextmanager
def watched_disk(monkeypatch, at=None, error=None):
    """Calls that change the disk, in order: the list of (call, what on) that is yielded grows.

    at     the one of them, from 0, that fails; a write has then written half
    error  what it fails with; None kills: all calls after it fail too
    """
    calls, opened, dead = [], {}, False

    def watch(name, call):
        def watching(*args, **kwargs):
            nonlocal dead
            calls.append((name, opened.get(args[0], args[0])))
            if dead or len(calls) - 1 == at:
                if name == "write" and not dead:
                    call(args[0], args[1][: len(args[1]) // 2])
                dead = error is None
                raise KilledError if error is None else OSError(error, os.strerror(error))
            result = call(*args, **kwargs)
            if name == "open":
                opened[result] = args[0]
            return result

        return watching

    with monkeypatch.context() as patch:
        for name in ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir"):
            patch.setattr(os, name, watch(name, getattr(os, name)))
        patch.setattr(save, "swap_paths", watch("exchange", save.swap_paths))
        yield calls
