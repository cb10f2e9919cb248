"""Groups between Ray actors: our backend registered with ``ray.util.collective``, and joining it.

Ray's stock GLOO backend shares one process group between all groups of an actor (its sums are wrong where groups
overlap) and knows no tags, handles, deadlines or abort. ``register_collective_backend`` is the public way to another:
``RayparCpu`` is what Ray sees, ``.group`` is the Group that raypar uses: over shared memory if all its members are on
one node, else over Gloo.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import ray
import torch.distributed as dist
from ray.experimental import internal_kv
from ray.util import collective
from ray.util.collective import types
from ray.util.collective.backend_registry import _global_registry, register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from torch import Tensor
from torch._C._distributed_c10d import Store

from raypar.actors.group import Group, GroupError, ReduceOp
from raypar.actors.ledger import Ledger
from raypar.actors.transport.gloo import GlooGroup, create_device
from raypar.actors.transport.links import same_place
from raypar.actors.transport.shm import ShmGroup

log = logging.getLogger(__name__)
BACKEND = "RAYPAR_CPU"
_NAMESPACE = b"raypar"
_CONNECT_TIMEOUT = 60.0
_OPS: dict[types.ReduceOp, ReduceOp] = {
    types.ReduceOp.SUM: "sum",
    types.ReduceOp.PRODUCT: "product",
    types.ReduceOp.MIN: "min",
    types.ReduceOp.MAX: "max",
}


def join(name: str, axis: str, size: int, rank: int, timeout: float, ledger: Ledger | None = None) -> Group:
    """Join a group from inside an actor; returns when every member has.

    name     unique to run, axis, index and generation: a name is never used twice, also after a failed attempt
    timeout  seconds any wait in the group may take

    Raises GroupError if a member does not come within a minute.
    """
    register()
    # this takes milliseconds; create_collective_group, from the driver, 0.6 s and a detached actor a group
    collective.init_collective_group(size, rank, types.Backend(BACKEND), name)
    group: Group = collective.get_group_handle(name).group
    group.axis, group.timeout = axis, timeout
    group.ledger = Ledger() if ledger is None else ledger
    return group


def leave(name: str) -> None:
    """Drop a group of this actor, closed or not; its name stays used."""
    if collective.is_group_initialized(name):
        collective.destroy_collective_group(name)


def close_together(groups: Mapping[str, Group]) -> None:
    """Tie an actor's groups: a fault in one aborts them all, so that no neighbour waits for its deadline."""

    def abort_all() -> None:
        for group in groups.values():
            group.abort()

    for group in groups.values():
        group.on_fault = abort_all


def register() -> None:
    """Make the backend known to this process (driver or actor)."""
    if not _global_registry.is_registered(BACKEND):
        register_collective_backend(BACKEND, RayparCpu)


class KVStore(Store):
    """A torch Store over Ray's internal key-value store: no port, no server, no first rank that has to live."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def set(self, key: str, value: Any) -> None:
        data = value if isinstance(value, bytes) else str(value).encode()
        internal_kv._internal_kv_put(self._name(key), data, overwrite=True, namespace=_NAMESPACE)

    def get(self, key: str) -> bytes:
        self.wait([key])
        value: bytes = internal_kv._internal_kv_get(self._name(key), namespace=_NAMESPACE)
        return value

    def check(self, keys: list[str]) -> bool:
        return all(internal_kv._internal_kv_exists(self._name(key), namespace=_NAMESPACE) for key in keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=_CONNECT_TIMEOUT)) -> None:
        end, pause = time.monotonic() + timeout.total_seconds(), 0.0005
        while not self.check(keys):
            if time.monotonic() > end:
                raise TimeoutError(f"a member did not come within {timeout.total_seconds():g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def clear(self) -> None:
        """Delete every key: a later group must not dial this one's addresses."""
        internal_kv._internal_kv_del(self._name(""), del_by_prefix=True, namespace=_NAMESPACE)

    def _name(self, key: str) -> bytes:
        return f"{self._prefix}/{key}".encode()


class RayparCpu(BaseGroup):
    """What ``ray.util.collective`` holds: its own calls work too, translated to the Group."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        store = KVStore(f"{ray.get_runtime_context().get_job_id()}/{group_name}")
        self.group = _cpu_group(group_name, rank, world_size, store)
        if rank == 0:
            store.clear()

    @classmethod
    def backend(cls) -> str:
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        return bool(dist.is_available() and dist.is_gloo_available())

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
            raise GroupError(self.group_name, "call", None, "one tensor a call: a CPU actor has one device")
        op(tensors[0])


def _op(options: Any) -> ReduceOp:
    return "sum" if options is None else _OPS[options.reduceOp]


def _cpu_group(name: str, rank: int, size: int, store: Store) -> Group:
    try:
        together = same_place(store, rank, size)
    except (OSError, RuntimeError) as error:
        raise GroupError(name, "connect", None, str(error) or type(error).__name__) from error
    if together:
        return ShmGroup(name, "default", rank, size, _CONNECT_TIMEOUT, store=store, connect_timeout=_CONNECT_TIMEOUT)
    log.info("group %s: its members are on several nodes, so it goes over TCP", name)
    return GlooGroup(
        name,
        "default",
        rank,
        size,
        _CONNECT_TIMEOUT,
        store=store,
        device=_device(),
        connect_timeout=_CONNECT_TIMEOUT,
    )


@functools.cache
def _device() -> Any:
    """One Gloo device a process, on the node's own address: every group shares its event loop and listener."""
    return create_device(ray.util.get_node_ip_address())
