"""Which parts of tensors stand-ins have: replicas have copies of the weights, and with ZeRO divide their states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raypar.actors.relayout.share_index import ShareContents, StoredBoxes
from raypar.actors.sharding import Box, Pieces, Shard, Sharding, box_at

ROWS, COLUMNS = 8192, 1  # of each weight


def parts_of(world: Any, rank: int) -> dict[str, Shard]:
    """Return by name the parts of tensors that a rank has: weights, and of their states what it updates."""
    at, mesh = world.at(rank), world.mesh
    layers, replicas = max(4, mesh.pp), mesh.dp * mesh.cp
    replica, found = at["dp"] * mesh.cp + at["cp"], dict[str, Shard]()
    weights = states = Pieces.at(at["tp"], mesh.tp)
    if world.sharded:
        states = Pieces.at(at["tp"] * replicas + replica, mesh.tp * replicas)
    for layer in (layer for layer in range(layers) if layer * mesh.pp // layers == at["pp"]):
        for name, pieces in ((f"layers.{layer}.weight", weights), (f"optim.layers.{layer}.weight.exp_avg", states)):
            found[name] = Shard((ROWS, COLUMNS), Sharding({0: pieces}))
    return found


def saved_parts(world: Any, rank: int) -> dict[str, Shard]:
    """Return by name the parts of tensors that a rank saves: of equal copies on several ranks, the first."""
    at, parts = world.at(rank), parts_of(world, rank)
    is_first = at["dp"] == at["cp"] == 0
    return {name: part for name, part in parts.items() if (name.startswith("optim") and world.sharded) or is_first}


def nbytes_of(parts: Mapping[str, Shard]) -> int:
    """Return the bytes of parts of tensors, in fp32."""
    return sum(4 * math.prod(part.shape) for part in parts.values())


def boxes_of(parts: Mapping[str, Shard]) -> dict[str, tuple[Box]]:
    """Return the boxes of parts of tensors, by name: one each."""
    return {name: (box_at(part.offset, part.shape),) for name, part in parts.items()}


def contents_of(parts: Mapping[str, Shard]) -> ShareContents:
    """Return what ``snapshot_contents`` says of a snapshot with these parts of tensors."""
    return {name: StoredBoxes(parts[name].whole, boxes) for name, boxes in boxes_of(parts).items()}
