"""Groups between real Ray actors: four of them in three overlapping groups each, and what happens when one dies."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import nullcontext

import pytest
import torch

from raypar.actors.collective import connect
from raypar.actors.collective.connect import Capability
from raypar.actors.collective.errors import GroupError
from raypar.actors.collective.gpu.staged import StagedGroup
from raypar.actors.collective.ledger import Ledger
from raypar.actors.collective.ray import ray_groups as joining
from raypar.actors.collective.ray import ray_private
from raypar.actors.mesh.mesh import Mesh

MESH = Mesh(pp=2, dp=2)
VICTIM = 1
MODULE = sys.modules[__name__]


class Member:
    """One rank of the mesh with a group for each axis that is split, and one of all."""

    def __init__(self, rank):
        self.rank = rank

    def join(self, name):
        self.groups, self.members = {}, {}
        for axis in ("pp", "dp", "all"):
            index, members = (0, range(MESH.size)) if axis == "all" else MESH.group_of(axis, self.rank)
            self.members[axis] = members
            self.groups[axis] = joining.join(
                f"{name}/{axis}/{index}", axis, len(members), members.index(self.rank), 30.0
            )
        joining.close_together(self.groups)

    def reduce(self, rounds):
        """All three groups at once, each in a thread of its own; returns when each thread ended, and its error."""
        ends = {}
        threads = [threading.Thread(target=self._reduce, args=(axis, rounds, ends)) for axis in self.groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ends

    def _reduce(self, axis, rounds, ends):
        error = None
        try:
            for turn in range(rounds):
                tensor = torch.full((1 + turn % 257,), float(10**self.rank + turn), dtype=torch.float64)
                self.groups[axis].all_reduce(tensor).wait()
                wanted = sum(10**rank + turn for rank in self.members[axis])
                if not tensor.eq(wanted).all():
                    error = f"round {turn}: {tensor[0]} instead of {wanted}"
                    break
        except GroupError as fault:
            error = f"GroupError: {fault}"
        ends[axis] = (time.monotonic(), error)

    def gpu(self, name):
        """A group of two GPUs that are one and none: everything about it but its tensors is as on a GPU."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "current_device", lambda: 0)
            patch.setattr(torch.cuda, "device", lambda device: nullcontext())
            patch.setattr(joining, "capability", lambda device: Capability("one", nccl=True, cupy=True))
            patch.setattr(connect, "StagedGroup", lambda inner, device: StagedGroup(inner, torch.device("cpu")))
            return self._on_gpus(name)

    def _on_gpus(self, name):
        out, ledger = self.stock(f"{name}/stock", joining.GPU_BACKEND), Ledger()
        group = joining.join(name, "dp", 2, self.rank, 20.0, ledger, torch.device("cuda", 0))
        joining.close_together({"dp": group})
        group.all_reduce(there := torch.ones(4)).wait()
        group.host.all_reduce(here := torch.ones(4)).wait()
        entry = ledger.entries()["dp", "all_reduce"]
        group.abort()
        try:
            group.host.all_reduce(here)
        except GroupError as fault:
            said = str(fault)
        joining.leave(name)
        kinds = [type(one).__name__ for one in (group, group.host)]
        return out, kinds, there.tolist(), here.tolist(), (entry.calls, group.host.timeout), said

    def stock(self, name, backend=joining.BACKEND):
        """ray.util.collective's own calls, on our backend."""
        from ray.util import collective as col
        from ray.util.collective.types import Backend

        rank, size = self.rank, 2
        joining.register_backends()
        col.init_collective_group(size, rank, Backend(backend), name)
        one, other = torch.full((3,), float(rank + 1)), 1 - rank
        out = {}

        col.allreduce(t := one.clone(), name)
        out["allreduce"] = t.tolist()
        col.reduce(t := one.clone(), 1, name)
        out["reduce"] = t.tolist()
        col.broadcast(t := one.clone(), 1, name)
        out["broadcast"] = t.tolist()
        col.allgather(parts := [torch.zeros(3) for _ in range(size)], one, name)
        out["allgather"] = [t.tolist() for t in parts]
        col.reducescatter(t := torch.zeros(3), [one.clone(), one * 10], name)
        out["reducescatter"] = t.tolist()
        col.barrier(name)
        if rank == 0:
            col.send(one, other, name)
            col.recv(t := torch.zeros(3), other, name)
        else:
            col.recv(t := torch.zeros(3), other, name)
            col.send(one, other, name)
        out["recv"] = t.tolist()
        col.destroy_collective_group(name)
        return out


@pytest.fixture(scope="module")
def actors(cluster):
    cluster.cloudpickle.register_pickle_by_value(MODULE)
    remote = cluster.remote(num_cpus=1, max_restarts=0)(Member)
    made = {rank: remote.remote(rank) for rank in range(MESH.size)}
    made["new"] = remote.remote
    yield made
    cluster.cloudpickle.unregister_pickle_by_value(MODULE)
    for rank in range(MESH.size):
        cluster.kill(made[rank])


def stocked(rank):
    """What ray.util.collective's calls must give a rank."""
    return {
        "allreduce": [3.0] * 3,
        "reduce": [3.0 if rank == 1 else 1.0] * 3,
        "broadcast": [2.0] * 3,
        "allgather": [[1.0] * 3, [2.0] * 3],
        "reducescatter": [3.0 if rank == 0 else 30.0] * 3,
        "recv": [2.0 - rank] * 3,
    }


@pytest.mark.long
def test_rays_own_calls_work_on_our_backend(cluster, actors):
    got = cluster.get([actors[rank].stock.remote("stock") for rank in range(2)], timeout=60)
    assert got == [stocked(rank) for rank in range(2)]


@pytest.mark.long
def test_a_group_leaves_no_keys_in_rays_store(cluster, actors):
    from ray.experimental import internal_kv

    cluster.get([actors[rank].stock.remote("kept") for rank in range(2)], timeout=60)
    prefix = f"{cluster.get_runtime_context().get_job_id()}/kept/"
    assert ray_private.put(f"{prefix}other".encode(), b"1"), "here is where they would be"
    assert internal_kv._internal_kv_list(prefix.encode(), namespace=b"raypar") == [f"{prefix}other".encode()]
    ray_private.delete(prefix.encode())


@pytest.mark.long
def test_a_gpu_group_has_a_cpu_group_beside_it(cluster, actors):
    got = cluster.get([actors[rank].gpu.remote("gpus") for rank in range(2)], timeout=60)
    for rank, (out, kinds, there, here, counted, said) in enumerate(got):
        assert out == stocked(rank)
        assert kinds == ["StagedGroup", "ShmGroup"]
        assert (there, here) == ([2.0] * 4, [2.0] * 4)
        assert counted == (2, 20.0), "both count in one ledger and wait as long"
        assert said == "group gpus: all_reduce failed: the group was closed after an earlier fault"


@pytest.mark.long
def test_overlapping_groups_sum_right_a_thousand_times_and_survive_a_death(cluster, actors):
    ranks = range(MESH.size)
    cluster.get([actors[rank].join.remote("g@1") for rank in ranks], timeout=60)
    start = time.monotonic()
    ends = cluster.get([actors[rank].reduce.remote(1000) for rank in ranks], timeout=60)
    print(f"1,000 rounds in {time.monotonic() - start:.2f} s")
    assert all(set(end) == {"pp", "dp", "all"} for end in ends)
    assert not [error for end in ends for _, error in end.values() if error]

    refs = {rank: actors[rank].reduce.remote(10**9) for rank in ranks}
    time.sleep(0.5)
    killed = time.monotonic()
    cluster.kill(actors[VICTIM])
    survivors = [rank for rank in ranks if rank != VICTIM]
    ended = dict(zip(survivors, cluster.get([refs[rank] for rank in survivors], timeout=20), strict=True))
    last = max(end for ends in ended.values() for end, _ in ends.values())
    print(f"the last survivor's last group gave up {last - killed:.3f} s after the kill")
    assert all(error.startswith("GroupError") for ends in ended.values() for _, error in ends.values())
    assert last - killed < 1.0

    actors[VICTIM] = actors["new"](VICTIM)
    cluster.get([actors[rank].join.remote("g@2") for rank in ranks], timeout=30)
    ends = cluster.get([actors[rank].reduce.remote(50) for rank in ranks], timeout=30)
    assert not [error for end in ends for _, error in end.values() if error]
