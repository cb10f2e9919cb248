"""Weights that are sharded over replicas, or stored off the device, and are whole on it only while in use."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set

import torch
from torch import Tensor, nn

from raypar.actors.autograd.torch_private import storage_id
from raypar.actors.collective.group import Group, Handle
from raypar.actors.data_parallel.cut_layout import CutLayout, ReplicaCut
from raypar.actors.data_parallel.replica_checks import digest
from raypar.actors.machine.flat_memory import FlatMemory
from raypar.actors.machine.high_water import HighWater
from raypar.actors.machine.offload_storage import OffloadStorage
from raypar.actors.sharding import Shard
from raypar.actors.tensors import dense_strides, nbytes


class Unit:
    """The parameters of some layers, which are gathered together.

    Each replica stores its parts of the parameters in a shard. ``gather`` allocates the memory of all parameters on the
    device and fills it from the shards of all replicas; ``free`` releases it. In between a parameter is usable.
    Otherwise it has its shape and dtype, but all its elements are NaN and take no memory. Tensors that autograd has
    saved are views of the same storage, so they are valid again after the next ``gather``.

    Args:
        parameters: The parameters by logical name, with their initial values, which move into the shards.
        cuts: How the replicas divide each parameter, by logical name.
        group: The replicas among which the parameters are sharded; None if one replica has them all.
        storage: Storage of the shards.
        gathered: Counts the bytes of the actor's units that are whole.
        spans: Logical names of the parameters that have initial values only in this replica's spans.

    Attributes:
        shards: This replica's parts of the parameters, by logical name: spans (elements,), or parameters that it has
            whole, in their shape.
        parts: Which spans these are; parameters that are not cut are missing.
        strides: The strides of all parameters when they are whole, by logical name.
        digests: Digests of the initial values of parameters, by logical name, to compare between replicas. Those of
            parameters in ``spans`` are missing: one actor has drawn them for all.
        num_bytes: Bytes of all parameters together.

    Source: Rajbhandari et al. 2020, "ZeRO", section 5.3 (P_os+g+p); Zhao et al. 2023, "PyTorch FSDP", section 3.2.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        cuts: Mapping[str, ReplicaCut],
        group: Group | None,
        storage: OffloadStorage,
        gathered: HighWater,
        spans: Set[str] = frozenset(),
    ) -> None:
        self.digests = {name: digest({name: parameter}) for name, parameter in parameters.items() if name not in spans}
        self.num_bytes = sum(map(nbytes, parameters.values()))
        by_dtype = defaultdict[torch.dtype, dict[str, nn.Parameter]](dict)
        for name, parameter in parameters.items():
            by_dtype[parameter.dtype][name] = parameter
        self._flats = [_Flat(members, cuts, group, storage) for members in by_dtype.values()]
        self.shards = {name: flat.shards[name] for flat in self._flats for name in flat.shards}
        self.parts = {name: part for flat in self._flats for name, part in flat.parts.items()}
        self.strides = {name: stride for flat in self._flats for name, stride in flat.strides.items()}
        self._gathered = gathered
        self._handles: list[Handle] = []
        self._users = set[object]()

    @property
    def is_whole(self) -> bool:
        """Whether the parameters are whole, or being gathered."""
        return bool(self._users)

    @property
    def is_ready(self) -> bool:
        """Whether the parameters are whole and usable."""
        return bool(self._users) and not self._handles

    @property
    def memory(self) -> frozenset[int]:
        """Ids of the storages of the parameters while they are whole."""
        return frozenset(flat.storage for flat in self._flats)

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the logical name of the parameter whose memory, whole or freed, has a tensor; None if none has."""
        return next((name for flat in self._flats if (name := flat.name_of(tensor)) is not None), None)

    def prefetch(self) -> None:
        """Start to read the shards from the disk, if they are there, before the parameters are gathered."""
        if not self._users:
            for flat in self._flats:
                flat.prefetch()

    def gather(self, user: object) -> None:
        """Allocate the parameters' memory and start to gather them, unless they are whole.

        Args:
            user: The object that uses them until it calls ``free``. They stay whole while they have a user.
        """
        if not self._users:
            self._gathered.add(self.num_bytes)
            self._handles = [handle for flat in self._flats if (handle := flat.gather()) is not None]
        self._users.add(user)

    def wait(self) -> None:
        """Wait until the parameters are gathered."""
        for handle in self._handles:
            handle.wait()
        self._handles = []

    def free(self, user: object) -> None:
        """Free the parameters' memory if ``user`` is their last user."""
        if user in self._users:
            self.wait()
            self._users.remove(user)
            if not self._users:
                self._gathered.add(-self.num_bytes)
                for flat in self._flats:
                    flat.free()


class _Flat:
    """The parameters of one dtype of a unit: one flat tensor, of which each replica stores its parts.

    Attributes:
        shards: This replica's parts of the parameters, by logical name.
        parts: Which spans these are; parameters that are not cut are missing.
        strides: The strides of all parameters when they are whole, by logical name.
        storage: Id of the flat tensor's storage.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        cuts: Mapping[str, ReplicaCut],
        group: Group | None,
        storage: OffloadStorage,
    ) -> None:
        self._group, self._storage = group, storage
        self._layout = layout = CutLayout(parameters, cuts)
        self._members, self._names = list(parameters.values()), list(parameters)
        self.strides = {name: dense_strides(parameter) for name, parameter in parameters.items()}
        like = self._members[0]
        if group is None or storage.is_off_device:
            self._shard = storage.empty(layout.count, like.dtype)
        else:
            self._shard = group.empty(layout.count, like.dtype)  # the other replicas may read it in place
        self._flat = FlatMemory(layout.elements, like.dtype, like.device)
        self._whole = [
            self._flat.tensor.as_strided(parameter.shape, self.strides[name], layout.starts[name])
            for name, parameter in parameters.items()
        ]
        self._flat.release()
        self.shards: dict[str, nn.Parameter] = {}
        self.parts: dict[str, Shard] = {}
        with storage.accessible([self._shard], writes=True):
            for name in layout.own:
                self._keep(name, parameters[name].detach(), cuts[name])
        self.storage = storage_id(self._flat.tensor)
        self._starts = list(layout.starts.values())
        self._freed = [_memoryless(parameter) for parameter in self._members]
        for parameter, freed in zip(self._members, self._freed, strict=True):
            parameter.data = freed

    def _keep(self, name: str, parameter: Tensor, cut: ReplicaCut) -> None:
        """Copy this replica's part of a parameter into the shard."""
        part = cut.shard(parameter)
        assert part is not None
        taken = part.take(parameter)
        kept = self._layout.part(name, self._shard).as_strided(taken.shape, dense_strides(taken))
        self.shards[name] = nn.Parameter(kept.copy_(taken))
        if part.elements is not None:
            self.parts[name] = part

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the logical name of the parameter whose memory, whole or freed, has a tensor; None if none has."""
        key = storage_id(tensor)
        if key == self.storage:
            return self._names[max(0, bisect_right(self._starts, tensor.storage_offset()) - 1)]
        return next((name for name, one in zip(self._names, self._freed, strict=True) if storage_id(one) == key), None)

    def prefetch(self) -> None:
        """Start to read the shard."""
        self._storage.prefetch(self._shard)

    def gather(self) -> Handle | None:
        """Allocate memory for the flat tensor and start to gather it. Return None if this replica has all of it."""
        self._flat.take()
        for parameter, whole in zip(self._members, self._whole, strict=True):
            parameter.data = whole
        with self._storage.accessible([self._shard]):
            if self._group is None:
                for name in self._layout.own:
                    whole, part = self._layout.span(name, self._flat.tensor), self._layout.part(name, self._shard)
                    whole.copy_(part, non_blocking=True)
                return None
            part = self._shard.to(self._flat.tensor.device)  # the shard itself, unless it is stored off a GPU
            return self._group.all_gather_cut(self._flat.tensor, part, self._layout.cut)

    def free(self) -> None:
        """Release the flat tensor's memory."""
        for parameter, freed in zip(self._members, self._freed, strict=True):
            parameter.data = freed
        self._flat.release()


def _memoryless(parameter: Tensor) -> Tensor:
    """Return NaNs of a parameter's shape and dtype, which take the memory of one element."""
    return torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def digests_of(units: Iterable[Unit]) -> dict[str, bytes]:
    """Return the digests of all parameters of some units by logical name."""
    return {name: digest for unit in units for name, digest in unit.digests.items()}
