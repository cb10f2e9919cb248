"""Checks of the replicas: their weights must be equal, and those that replicas divide must not overlap in memory."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raypar.actors.autograd.torch_private import storage_id
from raypar.actors.collective.group import Group
from raypar.actors.models.init.deferred_init import named_slots, slots_of
from raypar.actors.models.init.unregistered import unregistered


def fixed_weights(layers: Iterable[nn.Module], parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """Find the weights whose memory must not move, because another tensor of the layers shares it.

    Args:
        layers: Every layer of this actor.
        parameters: Its trainable parameters by logical name.

    Returns:
        The logical names of these weights.
    """
    modules = [module for layer in layers for module in layer.modules()]
    tensors = {id(tensor): tensor for module in modules for *_, tensor in slots_of(module)}
    uses = Counter(map(storage_id, tensors.values()))
    return {name for name, parameter in parameters.items() if uses[storage_id(parameter)] > 1}


class CheckedTensor(NamedTuple):
    """A tensor of a layer.

    Attributes:
        layer: Index of the layer.
        name: Name of the tensor in messages.
        tensor: The tensor.
    """

    layer: int
    name: str
    tensor: Tensor

    @property
    def learns(self) -> bool:
        """Whether it is a trainable parameter."""
        return isinstance(self.tensor, nn.Parameter) and self.tensor.requires_grad


def overlapping(names: Sequence[str], modules: Sequence[nn.Module]) -> list[tuple[CheckedTensor, CheckedTensor]]:
    """Find the trainable parameters that share elements with another tensor of the layers.

    Args:
        names: Logical name of each layer.
        modules: All layers of a model; they may be on the meta device.

    Returns:
        For each such parameter, the parameter and the first such tensor; each pair once.
    """
    held = {
        id(tensor): CheckedTensor(index, f"{path}.{inner}", tensor)
        for index, module in reversed(list(enumerate(modules)))
        for path, part in module.named_modules(prefix=names[index])
        for _, inner, tensor in slots_of(part)
    }
    for index, module in enumerate(modules):
        for tensor in unregistered([module]):
            held.setdefault(id(tensor), CheckedTensor(index, f"a tensor that {names[index]} does not register", tensor))
    by_storage = defaultdict[int, list[CheckedTensor]](list)
    for one in held.values():
        by_storage[storage_id(one.tensor)].append(one)
    found: dict[frozenset[int], tuple[CheckedTensor, CheckedTensor]] = {}
    for sharers in by_storage.values():
        for one in sharers if len(sharers) > 1 else ():
            if one.learns:
                other = next((it for it in sharers if it is not one and _overlap(one.tensor, it.tensor)), None)
                if other is not None:
                    found.setdefault(frozenset((id(one.tensor), id(other.tensor))), (one, other))
    return list(found.values())


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage have bytes in common."""
    marks = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool)
    _bytes_of(one, marks).fill_(True)
    return bool(_bytes_of(other, marks).any())


def _bytes_of(tensor: Tensor, numbers: Tensor) -> Tensor:
    """Return the view of ``numbers`` (one number for each byte of the storage) that covers the tensor's bytes."""
    size = tensor.element_size()
    strides = [size * stride for stride in tensor.stride()]
    return numbers.as_strided((*tensor.shape, size), (*strides, 1), size * tensor.storage_offset())


class UnequalReplicasError(RuntimeError):
    """The replicas have different weights, or have computed different results of the same microbatch."""


class OtherInputsError(UnequalReplicasError):
    """A replica got different inputs than the others that compute the same microbatch: the cause is elsewhere."""


def digest(weights: Mapping[str, Tensor]) -> bytes:
    """Return the sha256 digest (32 bytes) of the names, dtypes, shapes and elements of weights."""
    total = hashlib.sha256()
    for name, weight in weights.items():
        total.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        total.update(weight.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return total.digest()


def structure(names: Sequence[str], layers: Sequence[nn.Module]) -> bytes:
    """Return the sha256 digest (32 bytes) of all about layers' tensors but their elements, in the tensors' order.

    Args:
        names: Logical name of each layer.
        layers: All layers of a model; they may be on the meta device.
    """
    total = hashlib.sha256()
    for name, layer in zip(names, layers, strict=True):
        for *_, inner, tensor in named_slots(name, layer):
            about = inner, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad
            total.update(f"{about}\n".encode())
    return total.digest()


def gathered(own: bytes, group: Group) -> list[bytes]:
    """Gather the bytes of every member of a group; all members give equally many, a multiple of 8."""
    words = torch.frombuffer(bytearray(own), dtype=torch.int64)
    found = torch.empty(group.size * len(words), dtype=torch.int64)
    group.host.all_gather(found, words).wait()
    return [row.numpy().tobytes() for row in found.view(group.size, len(words))]


def demand_same_layers(own: bytes, group: Group, labels: Sequence[str]) -> None:
    """Check that all members of a group have built the same layers, before they exchange parts of their weights.

    Args:
        own: The ``structure`` of this member's layers.
        group: The members to compare with.
        labels: Name of each member in the error message, by rank.

    Raises:
        UnequalReplicasError: Some members have other layers. Every member raises it.
    """
    if (found := _unequal(gathered(own, group), labels)) is not None:
        raise UnequalReplicasError(
            f"the layers of {found.unequal} are not those of {found.right} in name, shape or order: the model must be "
            "built alike in every process (model.fn goes through a set, say, whose order differs between processes: "
            "sort it)"
        )


def demand_equal(digests: Iterable[bytes], group: Group, labels: Sequence[str], when: str | None = None) -> None:
    """Check that all members of a group hold the same weights, by comparing digests.

    Args:
        digests: Digests of this member's weights, see ``digest``.
        group: The members to compare with.
        labels: Name of each member in the error message, by rank.
        when: Time of the check, as "in step 3"; None before the first step.

    Raises:
        UnequalReplicasError: The weights of some members differ from those of the majority, or from those of rank 0 if
            there is no majority. Every member raises it.
    """
    found = _unequal(gathered(hashlib.sha256(b"".join(digests)).digest(), group), labels)
    if found is None:
        return
    if when is None:
        raise UnequalReplicasError(
            f"the weights of {found.unequal} are not those of {found.right}: the model must be "
            "built alike in every process (a layer drew its weights from a generator that the run's seed does not "
            "reach, say)"
        )
    others = "those of all others" if found.is_majority else f"those of {labels[0]}, and nobody knows which are right"
    raise UnequalReplicasError(
        f"{when} the weights of {found.unequal} are not {others}: a bit has flipped in a memory or on "
        "its way (see that machine's error counters), or a layer of yours has changed weights on one replica only"
    )


class _Unequal(NamedTuple):
    """The members of a group that differ from the others.

    Attributes:
        unequal: Their names.
        right: Name of the first member from which they differ.
        is_majority: Whether more than half of the members are like that one.
    """

    unequal: str
    right: str
    is_majority: bool


def _unequal(rows: Sequence[bytes], labels: Sequence[str]) -> _Unequal | None:
    """Return which members differ from the majority, or from rank 0 if there is none; None if all are equal.

    Args:
        rows: What each member has, by rank.
        labels: Name of each member, by rank.
    """
    ((usual, count),) = Counter(rows).most_common(1)
    is_majority = 2 * count > len(rows)
    right = usual if is_majority else rows[0]
    unequal = [label for label, row in zip(labels, rows, strict=True) if row != right]
    return _Unequal(", ".join(unequal), labels[rows.index(right)], is_majority) if unequal else None
