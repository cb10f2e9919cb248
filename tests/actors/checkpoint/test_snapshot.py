"""What actors put into checkpoints, and that training goes on from it bit for bit: on threads, without Ray."""

from __future__ import annotations

import errno
from itertools import pairwise

import pytest
import torch
from torch import nn

from raypar.actors.checkpoint.shards import read_shard
from raypar.actors.checkpoint.snapshot import Copies
from raypar.actors.errors import CheckpointError
from raypar.actors.inspect.step import Notes
from raypar.actors.machine.offload_storage import DeviceStorage
from raypar.actors.specs.optim import SGD, AdamW, Muon
from raypar.actors.specs.precision import Precision
from tests.actors.data_parallel.test_even_parts import wide
from tests.support.snapshots import loaded, read, saved
from tests.support.team import Team, linears

HOST = DeviceStorage(torch.device("cpu"))

LAYOUTS = {
    "alone": {},
    "pp": {"pp": 2},
    "all_reduce": {"pp": 2, "dp": 2, "zero": 0},
    "zero": {"pp": 2, "dp": 2, "zero": 1},
    "servers": {"pp": 2, "dp": 2, "servers": 2},
}
MUON = Muon(lr=0.01, adamw=("layers.5.*",), rates={"layers.0.*": 0.5}, decay="wsd", decay_steps=2)
OPTIMIZERS = {"adamw": AdamW(lr=0.01, warmup=4), "sgd": SGD(lr=0.01), "plain sgd": SGD(momentum=0.0), "muon": MUON}


def team_of(layers=None, pp=1, m=2, **changes):
    servers = changes.pop("servers", 0)
    if servers:
        changes |= {"data_parallel": "parameter_server", "servers": servers}
    return Team(layers or linears(6), pp, m, **{"steps": 4} | changes)


def outcome(team, steps):
    """Losses and norms of some steps, then the weights of every replica."""
    results = [[(result.losses, result.grad_norm) for result in team.step(step)] for step in steps]
    return results, [team.weights(dp) for dp in range(team.world.mesh.dp)]


def same(one, other):
    assert one[0] == other[0]
    for mine, theirs in zip(one[1], other[1], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(weight, theirs[name]) for name, weight in mine.items())


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("optim", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_training_goes_on_bitwise(layout, optim, tmp_path):
    team = team_of(**layout, optim=optim)
    outcome(team, range(2))
    tensors = saved(team, tmp_path)
    wanted = outcome(team, range(2, 4))
    same(outcome(loaded(team_of(**layout, optim=optim), tmp_path, tensors), range(2, 4)), wanted)


def test_a_checkpoint_of_before_the_decay_of_wsd_goes_on_in_a_longer_run_as_if_that_had_been_meant(tmp_path):
    short, longer = (team_of(optim=MUON, steps=steps, zero=1, dp=2) for steps in (5, 9))
    outcome(short, range(2))
    tensors = saved(short, tmp_path)
    outcome(longer, range(2))
    wanted = outcome(longer, range(2, 9))
    same(outcome(loaded(team_of(optim=MUON, steps=9, zero=1, dp=2), tmp_path, tensors), range(2, 9)), wanted)


def test_a_run_that_only_stops_hands_on_which_data_were_left_out_before(tmp_path):
    """Else the run after it would train on the same data again, at another learning rate."""
    team = team_of(pp=2, nonfinite="skip")
    for actor in team.all:
        actor.member.parts.scaler.skipped, actor.member.parts.scaler.left_out = 1, 2
    tensors = saved(team, tmp_path)
    (tmp_path / "again").mkdir()
    again = saved(loaded(team_of(pp=2), tmp_path, tensors), tmp_path / "again")
    same(
        outcome(loaded(team_of(pp=2), tmp_path / "again", again), range(2, 4)),
        outcome(loaded(team_of(pp=2), tmp_path, tensors), range(2, 4)),
    )
    assert again.keys() == tensors.keys()


class Turned(nn.Module):
    """A layer whose weight is not contiguous."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4).t())

    def forward(self, x):
        return (x @ self.weight).tanh()


@pytest.mark.parametrize("changes", [{}, {"dp": 2, "zero": 3}, {"dp": 2, "zero": 1}])
def test_weights_that_are_not_contiguous_go_on_bitwise(changes, tmp_path):
    """Fused kernels walk the memory of a weight and of its state in one order."""

    settings = {"layers": lambda: [Turned(), Turned()], "optim": AdamW(lr=0.01), **changes}
    team = team_of(**settings)
    outcome(team, range(2))
    tensors = saved(team, tmp_path)
    wanted = outcome(team, range(2, 4))
    same(outcome(loaded(team_of(**settings), tmp_path, tensors), range(2, 4)), wanted)


def test_the_comparison_can_fail(tmp_path):
    team = team_of()
    outcome(team, range(2))
    weights = {name: logical for name, logical in saved(team, tmp_path).items() if not name.startswith("optim.")}
    wanted = outcome(team, range(2, 4))
    with pytest.raises(AssertionError):
        same(outcome(loaded(team_of(), tmp_path, weights), range(2, 4)), wanted)


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("there", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("here", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_reads_what_another_has_written(here, there, tmp_path):
    team = team_of(**here, optim=AdamW())
    outcome(team, range(2))
    tensors = saved(team, tmp_path)
    other = loaded(team_of(**there, optim=AdamW()), tmp_path, tensors)
    (tmp_path / "again").mkdir()
    again = saved(other, tmp_path / "again")
    assert {name: one.shape for name, one in again.items()} == {name: one.shape for name, one in tensors.items()}
    assert len([name for name in tensors if name.startswith("optim.")]) == 3 * 12
    weights = team.weights()
    for dp in range(other.world.mesh.dp):
        assert all(torch.equal(weight, weights[name]) for name, weight in other.weights(dp).items())


def test_each_tensor_is_written_once_and_a_tied_one_under_its_home(tmp_path):
    def tied():
        layers = linears(4)()
        layers[3][0].weight = layers[0][0].weight
        return layers

    team = team_of(tied, pp=2, optim=AdamW())
    outcome(team, range(2))
    tensors = saved(team, tmp_path)
    assert all(len(logical.slices) == 1 for logical in tensors.values())
    assert "layers.0.0.weight" in tensors
    assert not [name for name in tensors if "layers.3.0.weight" in name]
    wanted = outcome(team, range(2, 4))
    same(outcome(loaded(team_of(tied, pp=2, optim=AdamW()), tmp_path, tensors), range(2, 4)), wanted)


def norms():
    return [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)]


def test_buffers_are_each_replicas_own(tmp_path):
    team = team_of(norms, dp=2)
    outcome(team, range(2))
    tensors = saved(team, tmp_path)
    assert tensors["buffers.dp1.layers.0.1.running_mean"].shape == (4,)
    wanted = [{name: b.clone() for name, b in worker.stages[0].buffers().items()} for worker in team.workers]
    assert not torch.equal(*(buffers["layers.0.1.running_mean"] for buffers in wanted))
    wider = loaded(team_of(norms, dp=3), tmp_path, tensors)
    for worker, buffers in zip(wider.workers, [*wanted, wanted[0]], strict=True):
        found = worker.stages[0].buffers()
        assert all(torch.equal(found[name], buffer) for name, buffer in buffers.items())


def test_a_copy_is_of_the_moment_it_was_taken(tmp_path):
    copies, weight = Copies(HOST), torch.zeros(3)
    copies.take([("w", weight)])
    weight += 1
    _, slices = copies.write(tmp_path, "a.safetensors")
    assert slices.keys() == {"w"}
    assert torch.equal(read_shard(tmp_path, "a.safetensors")["w"], torch.zeros(3))


@pytest.mark.parametrize("slowest", [1e-3, 1e12])
def test_beside_steps_the_same_is_written(slowest, tmp_path, monkeypatch):
    monkeypatch.setattr("raypar.actors.checkpoint.snapshot._SLOWEST", slowest)
    monkeypatch.setattr("raypar.actors.machine.files._PIECE", 1000)
    copies, weights = Copies(HOST), {"w": torch.randn(1234), "b": torch.randn(3)}
    written = []
    for folder, beside in ((tmp_path / "alone", False), (tmp_path / "beside", True)):
        folder.mkdir()
        copies.take(weights.items())
        written.append(copies.write(folder, "w", beside=beside))
    assert written[0] == written[1]
    assert (tmp_path / "alone" / "w").read_bytes() == (tmp_path / "beside" / "w").read_bytes()


def test_a_full_disk_beside_steps_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    copies = Copies(HOST)
    copies.take([("w", torch.ones(1000000))])
    with monkeypatch.context() as patched:
        patched.setattr("raypar.actors.machine.files.os.write", full)
        with pytest.raises(CheckpointError, match="free some space"):
            copies.write(tmp_path, "a.safetensors", beside=True)
    assert not list(tmp_path.iterdir())


def test_room_is_made_ahead_kept_and_made_anew_for_more(tmp_path):
    copies, odd = (
        Copies(HOST),
        [("a", torch.ones(3, dtype=torch.bool)), ("b", torch.tensor(2.0)), ("c", torch.ones(0))],
    )
    copies.make_room(odd)
    places = []
    for tensors in (odd, odd, [*odd, ("d", torch.randn(5, 4, dtype=torch.float64).T)]):
        copies.take(tensors)
        places.append(copies._memory.result().data_ptr())
        file, _ = copies.write(tmp_path, f"{len(places)}")
        found = read_shard(tmp_path, file.name)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors)
        assert len(found) == len(tensors)
    assert places[0] == places[1]
    assert copies._memory.result().nbytes == 3 * 64 - 64 + 192


def test_a_copy_that_fails_is_told_by_who_writes_it(tmp_path):
    def refuse():
        yield "w", torch.zeros(3)
        raise MemoryError("enough")

    copies = Copies(HOST)
    copies.take(refuse())
    with pytest.raises(CheckpointError, match=r"can't be copied \(MemoryError: enough\)"):
        copies.write(tmp_path, "a.safetensors")
    copies.take([])
    assert copies.write(tmp_path, "a.safetensors") is None
    assert not list(tmp_path.iterdir())


OFFLOADS = {
    "none": {},
    "optimizer": {"offload": "optimizer"},
    "parameters": {"offload": "parameters"},
    "files": {"offload": "parameters", "offload_folder": True},
}
LEVELS = {
    "alone": {},
    "zero 1": {"dp": 2, "zero": 1},
    "zero 2": {"dp": 3, "zero": 2, "precision": Precision("bf16")},
    "zero 3": {"pp": 2, "dp": 2, "zero": 3},
    "hybrid": {"dp": 4, "shard": 2, "zero": 3, "precision": Precision("bf16")},
}


def offloaded(folder, offload, **changes):
    fields = OFFLOADS[offload] | {"optim": AdamW(lr=0.01), "clip": 0.5} | changes
    if "offload_folder" in fields:
        folder.mkdir(exist_ok=True)
        fields |= {"offload_folder": str(folder)}
    return team_of(wide(4), **fields)


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("here", ["none", "files"])
def test_training_goes_on_bitwise_with_any_other_offload(here, level, tmp_path):
    team = offloaded(tmp_path / "here", here, **LEVELS[level])
    outcome(team, range(2))
    tensors = saved(team, tmp_path)
    wanted = outcome(team, range(2, 4))
    for there in OFFLOADS:
        other = loaded(offloaded(tmp_path / "there", there, **LEVELS[level]), tmp_path, tensors)
        same(outcome(other, range(2, 4)), wanted)


@pytest.mark.sampled
@pytest.mark.parametrize(("here", "there"), list(pairwise([*LEVELS, *reversed(LEVELS)])))
def test_any_level_precision_and_mesh_reads_what_another_one_has_offloaded(here, there, tmp_path):
    team = offloaded(tmp_path / "here", "files", **LEVELS[here])
    outcome(team, range(2))
    tensors = saved(team, tmp_path)
    other = loaded(offloaded(tmp_path / "there", "parameters", **LEVELS[there]), tmp_path, tensors)
    assert saved_bits(other, tmp_path / "again") == saved_bits(team, tmp_path / "first")


def saved_bits(team, folder):
    return {name: (one.dtype, one.tolist()) for name, one in read(team, folder)[0].items()}


@pytest.mark.parametrize(("offload", "zero"), [("files", 3), ("files", 1), ("optimizer", 2)])
def test_an_offloaded_step_by_hand_is_rewound(offload, zero, tmp_path):
    """Copies of masters and states are where these are, and take the same room each time."""
    team = offloaded(tmp_path, offload, dp=2, zero=zero)
    team.step(0)
    workers = [worker.member for worker in team.workers]
    before, used = saved_bits(team, tmp_path / "before"), []
    for _ in range(3):
        notes = [Notes() for _ in workers]
        for worker, one in zip(workers, notes, strict=True):
            worker.state.remember(one)
        kept = {id(one) for one in workers[0].state.weights().values()}
        assert kept
        for name in workers[0].state.masters:
            part = notes[0].read(name, "part")
            assert workers[0].state.storage.holds(notes[0].read(name) if part is None else part)
        team.step(1)
        assert saved_bits(team, tmp_path / "changed") != before
        for worker, one in zip(workers, notes, strict=True):
            worker.state.restore(one)
        assert saved_bits(team, tmp_path / "after") == before
        used.append(workers[0].state.storage._used)
        del notes, one
    assert used[1] == used[2]
