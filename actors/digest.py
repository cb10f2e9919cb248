"""Whether replicas are alike: a digest of their weights, compared before the first step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raypar.actors.group import Group

_WORDS = 4  # int64s of a sha256


class UnequalReplicasError(RuntimeError):
    """Replicas that do not begin with the same weights."""


def digest(weights: Mapping[str, Tensor]) -> bytes:
    """sha256 over names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name, weight in weights.items():
        total.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        total.update(weight.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return total.digest()


def demand_equal(weights: Mapping[str, Tensor], group: Group, labels: Sequence[str]) -> None:
    """Compare weights with those of the other members of a group, whose names are ``labels``.

    Raises UnequalReplicasError, on every member alike.
    """
    words = torch.frombuffer(bytearray(digest(weights)), dtype=torch.int64)
    found = torch.empty(group.size * _WORDS, dtype=torch.int64)
    group.host.all_gather(found, words).wait()
    first, *others = found.view(group.size, _WORDS)
    unequal = [label for label, other in zip(labels[1:], others, strict=True) if not torch.equal(first, other)]
    if unequal:
        raise UnequalReplicasError(
            f"the weights of {', '.join(unequal)} are not those of {labels[0]}: the model must be built alike in every "
            "process (a layer drew its weights from a generator that the run's seed does not reach, say)"
        )
