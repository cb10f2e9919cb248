"""Peak bytes of gradient buckets, which are freed after each reduction or offload."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.actors.mesh.world import World
from raypar.planner.sizes.units import Units
from raypar.schedules.action import Action, Op
from raypar.schedules.rules import MAKES_GRADIENTS

_UNDER_WAY = 2  # buckets that are being reduced, beside those that are filled


class BucketBytes:
    """The gradients of a pipeline rank that are in buckets for a while.

    Args:
        world: The ranks of the run.
        units: The parameters of each stage.
        row: The row of the pipeline rank.
        each: The bytes of a gradient.
        bucket: The most bytes of a bucket that has several gradients.

    Attributes:
        has_buckets: Whether there are such buckets.
        waits: Whether gradients wait in them for the last of several backwards.
    """

    def __init__(self, world: World, units: Sequence[Units], row: Sequence[Action], each: int, bucket: int) -> None:
        self._row = row
        self._owners = world.owners + (world.experts.owners if world.experts else 0)
        self._sizes = [each * one.whole for one in units]
        self._tensors = [[each * size for size in one.largest] for one in units]
        self._bucket = bucket
        ends = [action.stage for action in row if action.op is Op.REDUCE_GRAD]
        self.waits = any(count > 1 for counts in self._rounds().values() for count in counts)
        self.has_buckets = world.reduces and (world.frees_buckets or len(set(ends)) < len(ends))

    def most(self) -> int:
        """Return the most bytes of gradients in buckets at a time.

        In a round of several backwards the gradients of the whole stage wait for the last one. In a round of one,
        buckets are reduced while they are made: each owner has one that is filled, and some are under way.
        """
        rounds = self._rounds()
        now = most = 0
        at, opened = dict.fromkeys(rounds, 0), set[int]()
        for stage, op, _, _ in self._row:
            if stage is None or stage not in rounds:
                continue
            several = at[stage] < len(rounds[stage]) and rounds[stage][at[stage]] > 1
            if op in MAKES_GRADIENTS:
                if several and stage not in opened:
                    opened.add(stage)
                    now += self._sizes[stage]
                most = max(most, now if several else now + self._passing(stage, len(rounds[stage])))
            elif op is Op.REDUCE_GRAD:
                at[stage] += 1
                if stage in opened:
                    opened.remove(stage)
                    now -= self._sizes[stage]
        return most

    def _passing(self, stage: int, rounds: int) -> int:
        """Return the most bytes in buckets during a backward that ends a round; a round before may be under way."""
        size = self._sizes[stage]
        bucket = min(self._bucket, -(-size // self._owners))
        count = self._owners + _UNDER_WAY
        alone = [tensor for tensor in self._tensors[stage][:count] if tensor > self._bucket]
        passing = sum(alone) + (count - len(alone)) * bucket
        return passing if rounds > 1 and not alone else min(size, passing)

    def _rounds(self) -> dict[int, list[int]]:
        """Return by stage how many backwards each of its rounds of reductions has."""
        found, left = dict[int, list[int]](), dict[int, int]()
        for stage, op, _, _ in self._row:
            if stage is not None and op in MAKES_GRADIENTS:
                left[stage] = left.get(stage, 0) + 1
            elif stage is not None and op is Op.REDUCE_GRAD:
                found.setdefault(stage, []).append(left.pop(stage, 0))
        return found
