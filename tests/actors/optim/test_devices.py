"""Groups of a GPU move tensors of the GPU only: what is offloaded to the host goes through it, also at a step's end.

There is no GPU here. Instead every tensor that is moved to one in the update is marked, and so is what is computed from
it; groups refuse others, and nothing may be computed from both kinds.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

import raypar as rp
from raypar.actors.collective.gpu.group import demand_device
from raypar.actors.optim.step import Updater
from tests.support.local_groups import LocalGroup, local_groups
from tests.support.team import Team

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
TO = Tensor.to


class OnGpu(Tensor):
    """A tensor that counts as one on the GPU, as all that is computed from it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [one for one in tree_flatten((args, kwargs or {}))[0] if isinstance(one, Tensor) and one.dim()]
        if func not in (Tensor.copy_, Tensor.view_as, TO, to) and not all(isinstance(one, OnGpu) for one in tensors):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        made = super().__torch_function__(func, types, args, kwargs or {})
        moved = (func in (TO, to) and HOST in args) or (func is Tensor.copy_ and not isinstance(args[0], OnGpu))
        return plain(made) if moved else made


def plain(tensor):
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor) if isinstance(tensor, OnGpu) else tensor


def to(tensor, *args, **words):
    if args and args[0] == GPU:
        return tensor if isinstance(tensor, OnGpu) else tensor.detach().clone().as_subclass(OnGpu)
    return TO(tensor, *args, **words)


class GpuGroup(LocalGroup):
    """In an update a group of the GPU, whose ``host`` is another group of the same members."""

    is_updating = False

    def _run(self, op, peer, sent, out, start, *args, **named):
        if self.is_updating:
            for one in args:
                where = GPU if isinstance(one, OnGpu) else HOST
                if isinstance(one, Tensor) and where != self.device:
                    demand_device(self.name, op, self.device, args)
        given = tree_map(plain, args)
        target = next((one for one, arg in zip(given, args, strict=True) if arg is out), None)
        return super()._run(op, peer, sent, target, start, *given, **named)


def gpu_groups(axis, size, timeout):
    groups = local_groups(axis, size, timeout)
    members = [GpuGroup(groups[0]._hub, axis, rank, size, timeout) for rank in range(size)]
    for member, host in zip(members, local_groups(axis, size, timeout), strict=True):
        member.host = host
    return members


class GpuTeam(Team):
    """A team whose groups are those of GPUs while it updates."""

    def _groups(self):
        for name, members in super()._groups():
            yield name, gpu_groups(members[0].axis, len(members), 10.0)


@contextmanager
def updates_on_gpu():
    update = Updater.step

    def step(self, *args):
        tensors = self.tensors
        groups = {self.group, tensors.group, *(one for each in tensors.partial.values() for one in each)} - {None}
        try:
            for group in groups:
                group.device, group.is_updating = GPU, True
            tensors.device = GPU
            return update(self, *args)
        finally:
            for group in groups:
                group.device, group.is_updating = HOST, False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Updater, "step", step)
        patch.setattr(Tensor, "to", to)
        yield


def tokens(step, microbatch, dp):
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(100 * step + 10 * microbatch + dp))
    return ids[:, :-1], ids[:, 1:]


def outcome(team):
    losses = [[result.losses for result in team.step(number)] for number in range(2)]
    return losses, [{name: one.tolist() for name, one in worker.masters().items()} for worker in team.workers]


MODEL = rp.GPT(layers=2, hidden=16, heads=2, seq=8, vocab=64, tied=True)
LAYOUTS = {
    "tied over pp": {"mesh": rp.Mesh(pp=2)},
    "partial over tp": {"mesh": rp.Mesh(tp=2), "sequence_parallel": True},
    "Muon over tp": {"mesh": rp.Mesh(pp=2, tp=2), "sequence_parallel": True, "optim": rp.Muon(lr=0.01)},
}


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_offloaded_update_sends_what_is_on_the_device(layout):
    fields = {"model": MODEL, "data": rp.Batches(tokens), "microbatches": 2, "steps": 2, "clip": 0.5}
    run = rp.Run(**fields | {"offload": "optimizer"} | LAYOUTS[layout])
    wanted = outcome(Team.of(run))
    with updates_on_gpu():
        team = GpuTeam.of(run)
        assert outcome(team) == wanted
    sent = {op for table in (team.ledger(axis)[0] for axis in ("pp", "tp")) for op in table}
    assert sent & {"send tied", "recv tied"} if "tied" in layout else "all_reduce" in sent


def test_the_group_can_refuse(monkeypatch):
    """So the test above can fail."""
    monkeypatch.setattr(Tensor, "to", to)
    group = gpu_groups("x", 1, 10.0)[0]
    group.device, group.is_updating = GPU, True
    with pytest.raises(ValueError, match="all_reduce: a tensor is on cpu, this group moves tensors on cuda:0"):
        group.all_reduce(torch.ones(3))
    one = torch.ones(3).to(GPU)
    group.all_reduce(one).wait()
    assert isinstance(one + one, OnGpu)
    with pytest.raises(RuntimeError, match="same device"):
        one.add_(torch.ones(3))
    assert not isinstance(nn.Parameter(torch.zeros(3)).detach().copy_(one), OnGpu)
