"""Slices of which replicas have written a span each: read by any part, by any layout, and checked."""

from __future__ import annotations

import json
import math
import os
import random
import re
import tempfile
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypar.actors.checkpoint.assembler import Assembler, ShardFolder
from raypar.actors.checkpoint.logical import Logical, StoredSpans, merged
from raypar.actors.checkpoint.reports import shard_report, written_of
from raypar.actors.checkpoint.shards import ShardFile, stored_in, write_shard
from raypar.actors.errors import CheckpointError
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.sharding import ElementCut, Pieces, Shard, Sharding, first_ranks
from raypar.actors.specs.model import GPT
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.optim import SGD, AdamW
from raypar.actors.specs.precision import Precision
from raypar.actors.specs.run import Run
from raypar.checkpoint import Save, manifest_of, verified
from raypar.checkpoint.check import checkpoint_faults
from raypar.checkpoint.manifest import decode, encode
from tests.support.checkpoints import flip, forge, misplace, shorten
from tests.support.relayouts import relaid
from tests.support.snapshots import loaded, read
from tests.support.team import Team

MODEL = GPT(layers=2, hidden=32, heads=2, seq=8, vocab=256)
RUN = Run(model=MODEL, microbatches=4, steps=4, optim=AdamW(lr=0.01), clip=None, ema=0.9, timeout=20.0)


# --- any part of any slices ------------------------------------------------------------------------------------------


@st.composite
def cuts(draw, shape):
    """Shards of a tensor that a tensor group has cut along one dim, and replicas into spans: all of them together.

    The replicas may be those of several copies.
    """
    across = draw(st.integers(1, 3)) if shape else 1
    dim = draw(st.integers(0, max(0, len(shape) - 1)))
    size, copies, block = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 7))
    cut = ElementCut(block, draw(st.integers(0, size * copies - 1)), size, copies)
    order = draw(st.none() | st.sampled_from([*permutations(range(len(shape)))]))
    found = []
    for column in range(across):
        sharding = Sharding({dim: Pieces.at(column, across)} if across > 1 else {})
        elements = math.prod(Shard(shape, sharding).shape)
        spans = [cut.span(elements, rank) for rank in range(cut.num_ranks)]
        found += [Shard(shape, sharding, span, order, cut) for span in spans if span is not None]
    return found


@given(st.lists(st.integers(0, 6), max_size=3).map(tuple), st.data())
def test_any_part_is_read_from_spans_of_any_slices(shape, data):
    whole = torch.arange(math.prod(shape), dtype=torch.int16).view(shape)
    held, wanted = data.draw(cuts(shape)), data.draw(cuts(shape))
    parts = [*wanted, Shard(shape), *(replace(shard, elements=None) for shard in wanted)]
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr("raypar.actors.checkpoint.assembler.AT_ONCE", data.draw(st.sampled_from([1, 6, 1 << 20])))
        of_files = list[Logical]()
        for number, shard in enumerate(held):
            write_shard(Path(name), f"f{number}", {"w": shard.take(whole)})
            of_files.append(stored_in(f"f{number}", "w", shard.take(whole), shard))
        logical = merged(of_files)
        assert not list(logical.faults())
        assembler = Assembler(ShardFolder(Path(name)))
        for shard in parts:
            found = assembler.read_part(logical, shard.part)
            assert torch.equal(found, shard.take(whole))
        if shape:
            odd = Sharding({0: Pieces(shape[0], tuple(range(1, shape[0], 2)))}) if shape[0] > 1 else Sharding()
            assert torch.equal(assembler.read(logical, odd), odd.take(whole))


def test_rows_that_are_too_long_are_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("raypar.actors.checkpoint.assembler.AT_ONCE", 1024)
    whole, cut = torch.randn(4, 3, 2000), ElementCut(64, 1, 3)
    shards = [Shard(whole.shape, elements=cut.span(whole.numel(), rank), cut=cut) for rank in range(3)]
    for rank, shard in enumerate(shards):
        write_shard(tmp_path, f"f{rank}", {"w": shard.take(whole)})
    logical = merged([stored_in(f"f{rank}", "w", shard.take(whole), shard) for rank, shard in enumerate(shards)])
    with monkeypatch.context() as patch:
        made, sizes = torch.empty, []

        def empty(*size, **words):
            found = made(*size, **words)
            sizes.append(found.nbytes)
            return found

        patch.setattr(torch, "empty", empty)
        column = Sharding({2: Pieces.at(7, 10)})
        assert torch.equal(Assembler(ShardFolder(tmp_path)).read(logical, column), column.take(whole))
    assert max(sizes[1:]) <= 1024
    assert sum(sizes[1:]) <= 4 * sizes[0]


def test_only_the_files_that_have_elements_of_the_part_are_opened(tmp_path):
    whole, cut = torch.randn(40, 10), ElementCut(64, 2, 4)
    shards = [Shard((40, 10), elements=cut.span(400, rank), cut=cut) for rank in range(4)]
    logical = merged([stored_in(f"f{rank}", "w", shard.take(whole), shard) for rank, shard in enumerate(shards)])
    write_shard(tmp_path, "f3", {"w": shards[3].take(whole)})
    assembler = Assembler(ShardFolder(tmp_path))
    assert torch.equal(assembler.read_part(logical, shards[3].part), shards[3].take(whole))
    with pytest.raises(CheckpointError, match="'f2' can't be read"):
        assembler.read_part(logical, shards[2].part)
    alone = stored_in("f3", "w", shards[3].take(whole), shards[3])
    assert torch.equal(assembler.read_part(alone, shards[3].part), shards[3].take(whole))
    with pytest.raises(CheckpointError, match="the span of replica 2 is not there"):
        assembler.read_part(alone, shards[2].part)


# --- layouts ---------------------------------------------------------------------------------------------------------


def on(zero, **axes):
    return {"mesh": Mesh(**axes), "zero": zero, "microbatches": 12 // axes.get("dp", 1)}


HALF, MOE_MODEL = {"precision": Precision("bf16")}, {"model": replace(MODEL, moe=MoE(experts=4, top_k=2))}
LONG = pytest.mark.long
TIED, MOMENTUM = {"model": replace(MODEL, tied=True)}, {"optim": SGD(lr=0.1, momentum=0.9)}
PAIRS = (
    pytest.param(on(1, dp=2), on(1, dp=3), id="another number of replicas"),
    pytest.param(on(1, dp=3), on(2, dp=2, tp=2), id="to tensor groups"),
    pytest.param(on(2, dp=2, tp=2), on(0, dp=1, pp=2), id="from tensor groups"),
    pytest.param(on(2, dp=2, pp=2) | TIED, on(1, dp=4) | TIED, id="tied over the pipeline"),
    pytest.param(on(3, dp=2), on(1, dp=4), id="from shards"),
    pytest.param(on(1, dp=4), on(3, dp=2), id="to shards"),
    pytest.param(on(1, dp=2) | HALF, on(2, dp=4) | HALF, id="half precision"),
    pytest.param(on(1, dp=4, shard=2) | MOMENTUM, on(1, dp=2) | MOMENTUM, id="hybrid"),
    pytest.param(on(2, dp=6, shard=2) | HALF, on(3, dp=6, shard=3) | HALF, id="more copies, to fewer"),
    pytest.param(on(3, dp=4, cp=2, shard=4), on(1, dp=3), id="copies of shards, context ranks", marks=LONG),
    pytest.param(on(1, dp=4, shard=2, tp=2), on(2, dp=4, shard=2, pp=2), id="copies, tensor groups", marks=LONG),
    pytest.param(on(2, dp=2, tp=2), on(1, dp=4, shard=2) | {"tile": 2}, id="to copies with tiles", marks=LONG),
    pytest.param(on(1, dp=4, ep=2) | MOE_MODEL, on(1, dp=2, ep=2) | MOE_MODEL, id="experts"),
    pytest.param(on(3, dp=3) | HALF, on(3, dp=2, tp=2) | HALF, id="shards in half precision"),
    pytest.param(on(1, dp=1, cp=2), on(1, dp=2) | {"tile": 2}, id="to tiles"),
)


def state(team, folder):
    """All that a team saves, whole; and the checkpoint's tensors."""
    found, tensors = read(team, folder)
    return {name: one for name, one in found.items() if not name.startswith("buffers.")}, tensors


def equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.sampled
@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_a_layout_reads_every_bit_that_another_has_written(here, there, tmp_path):
    team = Team.of(replace(RUN, **here))
    team.step(0)
    wanted, tensors = state(team, tmp_path / "here")
    assert any(name.endswith(".ema") for name in wanted)
    spans = [one for of in tensors.values() for one in of.slices if isinstance(one, StoredSpans)]
    assert bool(spans) == team.world.sharded
    other = loaded(Team.of(replace(RUN, **there)), tmp_path / "here", tensors)
    found, _ = state(other, tmp_path / "there")
    equal(found, wanted)
    relaid_team, _, _ = relaid(team, replace(RUN, **there))
    found, _ = state(relaid_team, tmp_path / "relaid")
    equal(found, wanted)
    again, _, _ = relaid(relaid_team, replace(RUN, **here))
    found, _ = state(again, tmp_path / "again")
    equal(found, wanted)


@pytest.mark.sampled
@pytest.mark.parametrize(("zero", "fewer"), [(1, 2), (1, 3), (2, 3), (3, 3)])
def test_a_run_shrinks_and_grows_with_the_losses_of_one_that_does_not(zero, fewer):
    run = replace(RUN, **on(zero, dp=4), ema=None)
    whole, team = Team.of(run), Team.of(run)
    for step, dp in enumerate((4, fewer, 4)):
        if dp != team.run.mesh.dp:
            team, moves, _ = relaid(team, replace(run, **on(zero, dp=dp)))
            assert any(move.is_sent for move in moves)
        team.step(step)
        whole.step(step)
    ours, theirs = team.masters(), whole.masters()
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6) for name in theirs)


def test_a_weight_that_all_replicas_have_does_not_move():
    """Only optimizer states and averages do: the layers of every actor have the whole weight."""
    team = Team.of(replace(RUN, **on(1, dp=3)))
    team.step(0)
    _, moves, _ = relaid(team, replace(RUN, **on(1, dp=2)))
    assert {move.tensor.partition(".")[0] for move in moves if move.is_sent} == {"optim"}


# --- files -----------------------------------------------------------------------------------------------------------


def save(team, folder, step=1):
    """A checkpoint of a team."""
    with Save(folder, step) as under_way:
        team.each(lambda actor: actor.stage())
        reports = team.each(lambda actor: actor.write(str(under_way.path)))
        written = written_of(one for one in reports if one is not None)
        return under_way.commit(manifest_of(step, 0, {"steps": 4}, written), None)


@pytest.mark.parametrize(
    ("zero", "precision", "axes"),
    [
        (1, "fp32", {"dp": 4}),
        (2, "bf16", {"dp": 4}),
        (1, "fp32", {"dp": 4, "shard": 2}),
        (2, "fp32", {"dp": 6, "shard": 2}),
        (3, "bf16", {"dp": 6, "shard": 3}),
    ],
)
def test_every_actor_writes_an_equal_share(zero, precision, axes, tmp_path):
    """Those of all copies of the model."""
    model = replace(MODEL, hidden=64, vocab=512)
    team = Team.of(replace(RUN, model=model, precision=Precision(precision), **on(zero, **axes)))
    team.step(0)
    manifest = verified(save(team, tmp_path))
    sizes = [file.size for file in manifest.files]
    assert len(sizes) == len(team.all)
    assert max(sizes) <= 1.05 * sum(sizes) / len(sizes)
    assert manifest.version == 2
    assert decode(encode(manifest)) == (manifest, [])


def test_only_the_cuts_of_several_copies_say_how_many(tmp_path):
    """So what earlier builds wrote is read, and written again as it was."""
    for shard, copies in ((None, []), (2, [3])):
        team = Team.of(replace(RUN, **on(1, dp=6, shard=shard)))
        plain = json.loads(encode(verified(save(team, tmp_path / str(shard)))))
        assert {one["cut"]["size"] for one in spans_in(plain)} >= {shard or 6}
        large = [one["cut"] for one in spans_in(plain) if one["cut"]["size"] == (shard or 6)]
        assert [*{cut.get("copies") for cut in large} - {None}] == copies
        assert plain["version"] == 2
        assert len(plain["tables"]) <= 12


def test_a_checkpoint_without_spans_has_the_version_and_the_text_of_before(tmp_path):
    manifest = verified(save(Team.of(replace(RUN, **on(0, dp=2))), tmp_path))
    text = encode(manifest)
    assert manifest.version == 1
    assert b'"tables"' not in text
    assert b'"cut"' not in text


@pytest.mark.parametrize(("axes", "kinds"), [({"dp": 3}, 1), ({"dp": 4, "shard": 2}, 1), ({"dp": 4, "ep": 2}, 3)])
def test_replicas_report_alike_what_all_have_spans_of(axes, kinds, tmp_path):
    """So the driver reads it once, and has what it has from the tensors of each file."""
    model = replace(MOE_MODEL["model"] if "ep" in axes else MODEL, hidden=64, vocab=512)
    team = Team.of(replace(RUN, model=model, **on(1, **axes)))
    team.each(lambda actor: actor.stage())
    reports = team.each(lambda actor: actor.write(str(tmp_path)))
    team.each(lambda actor: actor.stage())
    written = team.each(lambda actor: actor.member.state.write(str(tmp_path), beside=False))
    assert len({described for report in reports for _, described in report.divided}) == kinds
    assert sum(len(tensors) for _, tensors in written_of(reports)) < sum(len(tensors) for _, tensors in written) / 2
    assert encode(manifest_of(1, 0, {}, written_of(reports))) == encode(manifest_of(1, 0, {}, written))
    assert [written_of([shard_report(one)]) for one in written] == [[one] for one in written]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two checkpoints in spans of three replicas, of two steps."""
    folder = tmp_path_factory.mktemp("saved")
    team = Team.of(replace(RUN, ema=None, **on(1, dp=3)))
    team.step(0)
    first = save(team, folder, 1)
    team.step(1)
    return first, save(team, folder, 2)


def copied(path, folder):
    for file in path.iterdir():
        (folder / path.name).mkdir(exist_ok=True)
        os.link(file, folder / path.name / file.name)
    return folder / path.name


@pytest.mark.parametrize("damage", [flip, shorten, "misplace"])
@pytest.mark.parametrize("seed", range(3))
def test_damage_is_found(checkpoints, damage, seed, tmp_path):
    path, draw = copied(checkpoints[0], tmp_path), random.Random(seed)
    file = draw.choice([one for one in sorted(path.iterdir()) if one.suffix == ".safetensors"])
    for one in path.iterdir():  # links: what is damaged must be a copy
        raw = one.read_bytes()
        one.unlink()
        one.write_bytes(raw)
    if damage == "misplace":
        misplace(file, checkpoints[1], draw)
    else:
        damage(file, draw)
    assert checkpoint_faults(path)


def spans_in(plain):
    return [one for of in plain["tensors"].values() for one in of["slices"] if "cut" in one]


def change(**fields):
    return lambda plain: spans_in(plain)[0].update(fields)


def in_cut(**fields):
    return lambda plain: spans_in(plain)[0]["cut"].update(fields)


def tables(change):
    def forge(plain):
        plain["tables"] = change(plain["tables"])

    return forge


@pytest.mark.parametrize(
    ("forged", "says"),
    [
        (in_cut(block=0), "greater than or equal to 1"),
        (in_cut(block=1 << 60), "less than or equal"),
        (in_cut(block=128), "in the manifest|has no tensor|no slice"),
        (in_cut(size=1 << 40), "less than or equal"),
        (in_cut(size=4), "in 3 files, not 4"),
        (in_cut(size=2), "in 3 files, not 2"),
        (in_cut(first=3), "begins at replica 3, and there are 3"),
        (in_cut(first=-1), "greater than or equal to 0"),
        (in_cut(copies=0), "greater than or equal to 1"),
        (in_cut(copies=1 << 40), "less than or equal"),
        (in_cut(copies=2), "in 3 files, not 6"),
        (change(order=[0, 0]), "does not name each once"),
        (change(order=[5]), "does not name each once"),
        (change(shape=[1 << 40]), "leaves the tensor's shape"),
        (change(files=77), "there is no such table"),
        (change(files=-1), "there is no such table"),
        (change(files=[0, 1]), "no table of files"),
        (change(files=True), "no table of files"),
        (tables(lambda rows: [[0, 0, 0], *rows[1:]]), "listed for several replicas"),
        (tables(lambda rows: [rows[0][::-1], *rows[1:]]), "in the manifest|has no tensor|no slice"),
        (tables(lambda rows: [[0, 1, 99], *rows[1:]]), "there is no such table"),
        (tables(lambda rows: [[0, 1, "x"], *rows[1:]]), "there is no such table"),
        (tables(lambda rows: "none"), "there is no such table"),
        (lambda plain: plain.pop("tables"), "there is no such table"),
        (lambda plain: plain.update(version=1), "no table of files"),
        (lambda plain: plain.update(version=3), "this raypar reads 1 and 2"),
        (lambda plain: spans_in(plain)[0].update(key=spans_in(plain)[1]["key"]), "taken for several slices|no tensor"),
    ],
)
def test_hostile_manifests_are_refused(checkpoints, forged, says, tmp_path):
    path = copied(checkpoints[0], tmp_path)
    raw = (path / "manifest.json").read_bytes()
    (path / "manifest.json").unlink()
    (path / "manifest.json").write_bytes(raw)
    forge(path, forged)
    faults = checkpoint_faults(path)
    assert faults
    assert any(re.search(says, fault) for fault in faults), faults


LLAMA_8B = {
    f"layers.{layer}.{name}.weight": shape
    for layer, (name, shape) in product(
        range(32),
        {
            "attn.q": (4096, 4096),
            "attn.k": (1024, 4096),
            "attn.v": (1024, 4096),
            "attn.o": (4096, 4096),
            "mlp.gate": (14336, 4096),
            "mlp.up": (14336, 4096),
            "mlp.down": (4096, 14336),
            "norm1": (4096,),
            "norm2": (4096,),
        }.items(),
    )
} | {"embed.weight": (128256, 4096), "norm.weight": (4096,), "head.weight": (128256, 4096)}


@pytest.mark.parametrize(
    ("size", "copies", "most"),
    [
        (64, 1, 0.3e6),
        (8, 8, 0.32e6),
        pytest.param(4096, 1, 1e6, marks=pytest.mark.long),
        pytest.param(64, 64, 1e6, marks=pytest.mark.long),
    ],
)
def test_the_manifest_of_a_large_model_is_small(size, copies, most):
    ranks = size * copies
    firsts = first_ranks({name: math.prod(shape) for name, shape in LLAMA_8B.items()}, ranks)
    names = [f"pp0-dp{rank}-cp0-tp0.safetensors" for rank in range(ranks)]
    shards = [(ShardFile(name, 1 << 30, "0" * 64), {}) for name in names]
    for name, shape in LLAMA_8B.items():
        elements = math.prod(shape)
        cut = ElementCut(64 if elements < 65_536 else 1024, firsts[name], size, copies)
        files = {rank: names[rank] for rank in cut.ranks(elements, (0, elements))}
        for key in ("", "exp_avg", "exp_avg_sq"):
            stored = f"optim.{name}.{key}" if key else name
            spans = StoredSpans(stored, (0,) * len(shape), shape, (), cut, files)
            shards[0][1][stored] = Logical("F32", shape, (spans,))
        step = f"optim.{name}.step"
        has_first = next(cut.ranks(elements, (0, 1)))
        shards[has_first][1][step] = stored_in(names[has_first], step, torch.zeros(()))
    manifest = manifest_of(1, 0, {}, shards)
    assert len(encode(manifest)) <= most
