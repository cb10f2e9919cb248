"""Initial values that actors share out: one of them draws each tensor and sends the others their parts."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.actors.collective.group import Group
from raypar.actors.data_parallel.cut_layout import ReplicaCut
from raypar.actors.models.base import Model
from raypar.actors.sharding import Pieces, Shard, Sharding
from raypar.actors.specs.moe import orders_of
from raypar.actors.tensors import host_like, memory_order
from raypar.actors.worker.build.plan import ActorPlan


class Holders(NamedTuple):
    """The actors that hold parts of the same tensors.

    Attributes:
        tensor: The tensor group of this actor; None if tensors are not divided.
        replicas: The group of the replicas of this actor's parts; None if each draws for itself.
    """

    tensor: Group | None
    replicas: Group | None

    @property
    def size(self) -> int:
        """Their number."""
        return _size(self.tensor) * _size(self.replicas)

    @property
    def rank(self) -> int:
        """The number of this actor among them, with its rank in the tensor group innermost."""
        return _rank(self.replicas) * _size(self.tensor) + _rank(self.tensor)


class SharedDraws:
    """Random initial values, of which one actor draws each tensor and sends the others their parts.

    The tensors go round the actors that hold parts of them, the largest first. Everyone computes who draws which from
    names and sizes. An actor draws its next tensor before it takes part in sending the others', so that all draw at
    the same time, and it holds no more than one such tensor (or those that are only drawn together).

    Args:
        model: The model.
        layers: Indices of the layers of this actor's pipeline rank.
        seed: The run's seed.
        holders: Returns the holders of a tensor, by name; None for a tensor of which this actor holds nothing.
        cuts: How replicas divide the elements of tensors of which each needs only its own span, by name.
        once: Names of tensors that are sent only once, because their other uses will share that memory.
        is_loaded: Whether all trained weights are replaced before the first step. They begin with zeros then.

    Attributes:
        spans: Names of the tensors of which this actor has only got its span.
    """

    def __init__(
        self,
        model: Model,
        layers: Sequence[int],
        seed: int,
        holders: Callable[[str], Holders | None],
        cuts: Mapping[str, ReplicaCut],
        once: Collection[str],
        *,
        is_loaded: bool = False,
    ) -> None:
        self._model, self._seed = model, seed
        self._cuts, self._once = cuts, once
        self.spans = set[str]()
        self._tensors = dict[str, Tensor]()
        self._holders, self._drawers = dict[str, Holders](), dict[str, int]()
        self._sent, self._drawn = set[str](), dict[str, Tensor]()
        by_holders = defaultdict[Holders, list[dict[str, Tensor]]](list)
        self._needless = set[str]()
        for tensors in model.draws(layers):
            if is_loaded and all(one.requires_grad for one in tensors.values()):
                self._tensors |= tensors
                self._needless.update(tensors)
                continue
            first, *others = {holders(name) for name in tensors}
            if first is not None and not others and first.size > 1:
                by_holders[first].append(tensors)
        self._own = deque[dict[str, Tensor]]()
        for members, ones in by_holders.items():
            for number, tensors in enumerate(sorted(ones, key=_elements, reverse=True)):
                self._tensors |= tensors
                self._holders |= dict.fromkeys(tensors, members)
                self._drawers |= dict.fromkeys(tensors, number % members.size)
            self._own += (one for one in ones if self._drawers[next(iter(one))] == members.rank)

    def __contains__(self, name: object) -> bool:
        """Return whether a tensor is drawn by one actor for all that hold parts of it, or by none."""
        return name in self._tensors

    @torch.no_grad()
    def part(self, name: str, shard: Shard) -> Tensor:
        """Return this actor's part of a tensor, on the CPU; all that hold parts of it call this in the same order.

        Args:
            name: The name under which the tensor is drawn.
            shard: The part that this actor's tensor group leaves to it.

        Returns:
            The part. If replicas cut it, only their spans are sent: elements outside of this actor's are undefined.

        Raises:
            GroupError: Another actor did not take part in time.
        """
        made = _alone(shard.take(self._tensors[name]))
        if name in self._needless:
            return made.zero_()
        if name in self._cuts:
            self.spans.add(name)
        if name in self._sent and name in self._once:
            return made
        self._sent.add(name)
        self._draw_ahead()
        tensor, replicas = self._holders[name]
        replica, rank = divmod(self._drawers[name], _size(tensor))
        is_drawer = self._drawers[name] == self._holders[name].rank
        if tensor is not None and _rank(replicas) == replica:
            _send_slices(tensor, rank, self._take(name) if is_drawer else None, made, shard)
        elif is_drawer:
            made = _alone(self._take(name), copies=False)
        if replicas is not None:
            self._send_to_replicas(name, replicas, replica, made)
        return made

    def _draw_ahead(self) -> None:
        """Draw this actor's next tensor, unless it has one that is not sent."""
        while not self._drawn and self._own:
            self._draw(self._own.popleft())

    def _draw(self, tensors: Mapping[str, Tensor]) -> None:
        values = self._model.draw(tensors, self._seed)
        self._drawn |= dict(zip(tensors, (value.detach() for value in values), strict=True))

    def _take(self, name: str) -> Tensor:
        """Return a whole tensor that this actor draws, and keep it no longer."""
        if name not in self._drawn:
            self._draw(next((one for one in self._own if name in one), {name: self._tensors[name]}))
            self._own = deque(one for one in self._own if name not in one)
        return self._drawn.pop(name)

    def _send_to_replicas(self, name: str, replicas: Group, root: int, made: Tensor) -> None:
        """Send a slice of a tensor from one replica to the others, whole or each its span, in place."""
        flat = _in_memory(made)
        if (cut := self._cuts.get(name)) is None:
            _broadcast(replicas, root, flat)
            return
        spans = cut.holders(len(flat))
        every = [spans.get(rank % cut.size, (0, 0)) for rank in range(replicas.size)]  # in each copy of the weights
        parts = [flat[start:stop] for start, stop in every]
        _scatter(replicas, root, parts if replicas.rank == root else None, parts[replicas.rank])


def shared_draws(
    plan: ActorPlan,
    model: Model,
    layers: Sequence[int],
    groups: Mapping[str, Group],
    cuts: Mapping[str, ReplicaCut],
    same: Mapping[str, str],
) -> SharedDraws:
    """Return the initial values that an actor draws together with the others that hold parts of its tensors.

    Replicas that do not share the update draw for themselves; their tensor groups draw together.

    Args:
        plan: The actor's plan.
        model: The model.
        layers: Indices of the layers of its pipeline rank.
        groups: Its groups by key.
        cuts: How replicas divide the elements of parameters, by logical name.
        same: For each copy of a tied weight that needs no memory, the parameter whose memory it shares.
    """
    world, base, orders = plan.world, model.drawn, orders_of(plan.run.expert_order)
    parts = world.mesh.expert_parts
    holder = groups["ep"].rank - (groups["ep"].size - parts if world.mesh.expert_actors else 0) if "ep" in groups else 0
    tensor = groups.get("tp")
    dense = Holders(tensor, groups.get("dp") if world.sharded else None)
    experts = Holders(None if world.mesh.folds_experts else tensor, groups.get("edp") if world.sharded else None)

    def holders(name: str) -> Holders | None:
        if not world.mesh.divides_experts or name not in base.experts:
            return dense
        return experts if base.experts[name].part(parts, orders) == holder else None

    once = {model.originals.get(source, source) for source in same.values()}
    spans = cuts if world.gathers else {}
    return SharedDraws(base, layers, plan.run.seed, holders, spans, once, is_loaded=plan.is_loaded)


def _size(group: Group | None) -> int:
    return 1 if group is None else group.size


def _rank(group: Group | None) -> int:
    return 0 if group is None else group.rank


def _elements(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def _alone(tensor: Tensor, *, copies: bool = True) -> Tensor:
    """Return a tensor on the CPU that is dense and alone in its memory, like another one.

    Args:
        tensor: The other one, perhaps a meta tensor. The elements of a meta tensor are undefined in the result.
        copies: Whether to copy it even if it is such a tensor.
    """
    if tensor.is_meta:
        return host_like(tensor)
    is_alone = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return tensor if is_alone and not copies else tensor.clone()


def _in_memory(tensor: Tensor) -> Tensor:
    """Return the view (elements,) of a dense tensor in memory order."""
    return tensor.permute(memory_order(tensor)).view(-1)


def _send_slices(group: Group, root: int, whole: Tensor | None, made: Tensor, shard: Shard) -> None:
    """Send every member of a tensor group its slice of a tensor that one of them has.

    Args:
        group: The tensor group.
        root: The member that has the tensor.
        whole: The tensor on the root; None on the others.
        made: Memory for this member's slice.
        shard: Which slice it is.
    """
    shards = _shards_of(group, shard)
    if all(one.is_whole for one in shards):
        if whole is not None:
            made.copy_(whole)
        _broadcast(group, root, _in_memory(made))
        return
    parts = None if whole is None else [_in_memory(_alone(one.take(whole))) for one in shards]
    _scatter(group, root, parts, _in_memory(made))


def _shards_of(group: Group, own: Shard) -> list[Shard]:
    """Return the slices of a tensor that the members of a tensor group hold, by rank."""
    numbers = list[int]()
    for dim, pieces in own.sharding.dims.items():
        numbers += (dim, pieces.count, len(pieces.own), *pieces.own)
    counts = torch.empty(group.size, dtype=torch.int64)
    group.host.all_gather(counts, torch.tensor([len(numbers)])).wait()
    found = torch.empty(int(counts.sum()), dtype=torch.int64)
    if len(found):
        group.host.all_gather_parts(found, torch.tensor(numbers, dtype=torch.int64), counts.tolist()).wait()
    return [Shard(own.whole, _sharding_of(one.tolist())) for one in found.split(counts.tolist())]


def _sharding_of(numbers: Sequence[int]) -> Sharding:
    """Return the sharding that a row of numbers of ``_shards_of`` describes."""
    dims, rest = dict[int, Pieces](), list(numbers)
    while rest:
        dim, count, length, *rest = rest
        dims[dim], rest = Pieces(count, tuple(rest[:length])), rest[length:]
    return Sharding(dims)


def _broadcast(group: Group, root: int, flat: Tensor) -> None:
    """Send a tensor (elements,) on the CPU from one member to all, in place."""
    moved = flat.to(group.device)
    group.broadcast(moved, root).wait()
    if moved is not flat:
        flat.copy_(moved)


def _scatter(group: Group, root: int, parts: Sequence[Tensor] | None, own: Tensor) -> None:
    """Send every member its part of a tensor that one of them has.

    Args:
        group: The group.
        root: The member that has the tensor.
        parts: On the root, the parts (elements,) on the CPU by rank; None on the others.
        own: Memory for this member's part (elements,), on the CPU.
    """
    gives, gets = [0] * group.size, [0] * group.size
    gets[root] = len(own)
    given = own.new_empty(0)
    if parts is not None:
        gives, given = [*map(len, parts)], torch.cat([*parts])
    got = torch.empty(len(own), dtype=own.dtype, device=group.device)
    group.all_to_all(got, given.to(group.device), gets, gives).wait()
    own.copy_(got)
