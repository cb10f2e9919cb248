"""Register our backends with ``ray.util.collective``, and join groups between Ray actors.

Ray's stock GLOO backend shares one process group among all groups of an actor, which gives wrong sums where groups
overlap, and it has no tags, handles, deadlines or abort; cupy_nccl.py says what its NCCL backend lacks. So we register
``RayparCpu`` and ``RayparGpu`` through the public ``register_collective_backend``. Their ``.group`` is the Group that
raypar uses. CPU groups use shared memory if all members are on one node, otherwise Gloo. GPU groups use NCCL through
torch or cupy, or copy through the host, as the members agree.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.util import collective
from ray.util.collective import types
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from torch import Tensor
from torch.distributed import Store

from raypar.actors.collective.connect import capability, cpu_group, gpu_group
from raypar.actors.collective.errors import GroupError
from raypar.actors.collective.group import TIMEOUT, Group
from raypar.actors.collective.ledger import Ledger
from raypar.actors.collective.ray import ray_private
from raypar.actors.collective.reductions import ReduceOp

BACKEND, GPU_BACKEND = "RAYPAR_CPU", "RAYPAR_GPU"
CPU = torch.device("cpu")
# Seconds between two requests of a waiting member: the first pause and the longest; each is 1.5 times the last.
_FIRST_PAUSE, _PAUSE = 0.0005, 0.02
_LATER = 32  # later pauses are this fraction of the time waited so far
_MEMBERS = (
    20  # with more, each pauses longer, so that together they make no more requests: of 1,024 each makes one a second
)


def join(
    name: str,
    axis: str,
    size: int,
    rank: int,
    timeout: float,
    ledger: Ledger | None = None,
    device: torch.device = CPU,
) -> Group:
    """Join a group from inside an actor. Returns once every member has joined.

    Args:
        name: Name unique to run, axis, index and generation. Never reuse one, not even after a failed attempt.
        axis: Mesh axis under which the ledger counts.
        size: Number of members.
        rank: Rank of this member.
        timeout: Deadline of every wait in the group, in seconds.
        ledger: Where ops are counted; None for a new one.
        device: Device of the tensors; all members must name the same kind.

    Raises:
        GroupError: A member did not join within a minute.
    """
    register_backends()
    backend = BACKEND if device.type == "cpu" else GPU_BACKEND
    with _current(device):
        # takes milliseconds; create_collective_group in the driver takes 0.6 s and a detached actor per group
        collective.init_collective_group(size, rank, types.Backend(backend), name)
    group: Group = collective.get_group_handle(name).group
    ledger = Ledger() if ledger is None else ledger
    for one in (group, group.host):
        one.axis, one.timeout, one.ledger = axis, timeout, ledger
    return group


def leave(name: str) -> None:
    """Destroy this actor's membership in a group, closed or not. The name stays used."""
    if collective.is_group_initialized(name):
        collective.destroy_collective_group(name)


def close_together(groups: Mapping[str, Group]) -> None:
    """Make a fault in one of an actor's groups abort all of them, so that no peer has to wait for its deadline.

    Args:
        groups: All groups of the actor, by key.
    """

    def abort_all() -> None:
        for group in groups.values():
            group.abort()

    for group in groups.values():
        group.on_fault = group.host.on_fault = abort_all


def register_backends() -> None:
    """Register the backends in this process (driver or actor)."""
    for backend in (RayparCpu, RayparGpu):
        if not hasattr(types.Backend, backend.backend()):  # a second registration is an error
            register_collective_backend(backend.backend(), backend)


def count_occurrence(name: str, times: int) -> bool:
    """Count an event of a job, in a store that outlives actors; return whether it happened at most ``times`` times.

    Args:
        name: A name unique to the job.
        times: How often it may happen.
    """
    prefix = f"{ray.get_runtime_context().get_job_id()}/{name}"
    for number in range(times):
        key = f"{prefix}/{number}".encode()
        if not ray_private.has(key):
            ray_private.put(key, b"")
            return True
    return False


class KVStore(Store):
    """A torch Store over Ray's internal key-value store: no port, no server, and no first rank that must stay alive.

    A wait requests all missing keys together, at growing intervals: some 200 times in a minute.

    Args:
        prefix: Beginning of all keys, unique to the group.
        members: Number of members that may wait at a time: the more, the fewer requests each of them makes.
    """

    def __init__(self, prefix: str, members: int = 1) -> None:
        super().__init__()
        self._prefix, self._found = prefix, dict[str, bytes]()
        self._times = max(1.0, members / _MEMBERS)

    def set(self, key: str, value: Any) -> None:
        data = value if isinstance(value, bytes) else str(value).encode()
        ray_private.put(self._name(key), data)

    def compare_set(self, key: str, expected: str, desired: Any) -> bytes:
        """Set a key that is not there yet (``expected`` must be ""), and return its value afterwards."""
        if expected:
            raise NotImplementedError("a key that is there stays as it is")
        if ray_private.put(self._name(key), desired, overwrite=False):
            return bytes(desired)
        return self.get(key)

    def get(self, key: str) -> bytes:
        if key not in self._found:
            self.wait([key])
        return self._found.pop(key)  # the next get of it is a new request

    def check(self, keys: list[str]) -> bool:
        return not self._missing(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=TIMEOUT)) -> None:
        """Return once some keys are there. Raises TimeoutError."""
        begin, pause = time.monotonic(), _FIRST_PAUSE * self._times
        keys = [key for key in keys if key not in self._found]
        while keys := self._missing(keys):
            waited = time.monotonic() - begin
            if waited >= timeout.total_seconds():
                raise TimeoutError(f"{keys[0]} did not come within {timeout.total_seconds():g} s")
            time.sleep(min(pause, timeout.total_seconds() - waited))
            pause = min(pause * 1.5, max(_PAUSE * self._times, waited / _LATER))

    def _missing(self, keys: list[str]) -> list[str]:
        """Return the keys that are not there, and keep the values of the others for ``get``. It makes one request."""
        names = {self._name(key): key for key in keys if key not in self._found}
        found = ray_private.get_all([*names]) if names else {}
        self._found |= {names[name]: data for name, data in found.items()}
        return [key for key in keys if key not in self._found]

    def clear(self) -> None:
        """Delete all keys, so that a later group cannot connect to this one's addresses."""
        ray_private.delete(self._name(""))

    def _name(self, key: str) -> bytes:
        return f"{self._prefix}/{key}".encode()


class _Translated(BaseGroup):
    """Adapter that ``ray.util.collective`` holds: it translates Ray's collective calls to those of our Group.

    Ray creates it in ``init_collective_group``.

    Args:
        world_size: Number of members.
        rank: Rank of this member.
        group_name: Name of the group.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._store = KVStore(f"{ray.get_runtime_context().get_job_id()}/{group_name}", world_size)
        self.group = self._connected(group_name, rank, world_size, self._store)
        self._clear()

    @abstractmethod
    def _connected(self, name: str, rank: int, size: int, store: KVStore) -> Group:
        """Return the Group once every member is connected.

        Args:
            name: Name of the group.
            rank: Rank of this member.
            size: Number of members.
            store: Store for the exchange of addresses.
        """

    def _clear(self) -> None:
        if self.rank == 0:
            self._store.clear()

    def destroy_group(self) -> None:
        self.group.abort()

    def allreduce(self, tensor: list[Tensor], allreduce_options: Any = None) -> None:
        self._each(tensor, lambda t: self.group.all_reduce(t, _op(allreduce_options)).wait())

    def barrier(self, barrier_options: Any = None) -> None:
        self.group.barrier().wait()

    def reduce(self, tensor: list[Tensor], reduce_options: Any = None) -> None:
        self._each(tensor, lambda t: self.group.reduce(t, reduce_options.root_rank, _op(reduce_options)).wait())

    def broadcast(self, tensor: list[Tensor], broadcast_options: Any = None) -> None:
        self._each(tensor, lambda t: self.group.broadcast(t, broadcast_options.root_rank).wait())

    def allgather(self, tensor_list: list[list[Tensor]], tensor: list[Tensor], allgather_options: Any = None) -> None:
        out = tensor[0].new_empty((self.world_size, *tensor[0].shape))
        self.group.all_gather(out, tensor[0]).wait()
        for target, part in zip(tensor_list[0], out, strict=True):
            target.copy_(part)

    def reducescatter(
        self, tensor: list[Tensor], tensor_list: list[list[Tensor]], reducescatter_options: Any = None
    ) -> None:
        parts = tensor[0].new_empty((self.world_size, *tensor[0].shape))
        for part, source in zip(parts, tensor_list[0], strict=True):
            part.copy_(source)
        self.group.reduce_scatter(tensor[0], parts, _op(reducescatter_options)).wait()

    def send(self, tensor: list[Tensor], send_options: Any) -> None:
        self._each(tensor, lambda t: self.group.send(t, send_options.dst_rank).wait())

    def recv(self, tensor: list[Tensor], recv_options: Any) -> None:
        self._each(tensor, lambda t: self.group.recv(t, recv_options.src_rank).wait())

    def _each(self, tensors: list[Tensor], op: Callable[[Tensor], None]) -> None:
        if len(tensors) != 1:
            raise GroupError(self.group_name, "call", None, "one tensor a call: an actor has one device")
        op(tensors[0])


class RayparCpu(_Translated):
    """Ray backend for tensors on CPUs."""

    @classmethod
    def backend(cls) -> str:
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        return bool(dist.is_available() and dist.is_gloo_available())

    def _connected(self, name: str, rank: int, size: int, store: KVStore) -> Group:
        return cpu_group(name, rank, size, store, node_address())


class RayparGpu(_Translated):
    """Ray backend for tensors on GPUs: each member uses the current GPU of the thread that joins."""

    @classmethod
    def backend(cls) -> str:
        return GPU_BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        return RayparCpu.check_backend_availability() and torch.cuda.is_available()

    def destroy_group(self) -> None:
        super().destroy_group()
        self._clear()  # the keys of edges that were connected after the group

    def _connected(self, name: str, rank: int, size: int, store: KVStore) -> Group:
        device = torch.device("cuda", torch.cuda.current_device())
        return gpu_group(name, rank, size, store, node_address(), device, capability(device))


def _op(options: Any) -> ReduceOp:
    op: ReduceOp = "sum" if options is None else options.reduceOp.name.lower()
    return op


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the thread's current one: Ray does not pass a device to a backend's constructor."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def node_address() -> str:
    """Return this node's own IP address, not loopback: members may be on other nodes."""
    return str(ray.util.get_node_ip_address())
