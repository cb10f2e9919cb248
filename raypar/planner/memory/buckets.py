"""Peak bytes of gradient buckets, which are freed after each reduction or offload."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.actors.bucket_bounds import UNDER_WAY, most_in_buckets
from raypar.actors.mesh.world import World
from raypar.actors.portions import portions_by_kind
from raypar.planner.sizes.units import TensorSize, Units
from raypar.schedules.action import Action, Op
from raypar.schedules.rules import MAKES_GRADIENTS


class BucketBytes:
    """The gradients of a pipeline rank that are in buckets for a while.

    Args:
        world: The ranks of the run.
        units: The parameters of each stage.
        row: The row of the pipeline rank.
        gradient: The bytes of an element of a gradient.
        weight: The bytes of an element of a weight.
        bucket: The most bytes of a bucket that has several gradients.

    Attributes:
        has_buckets: Whether there are such buckets.
        waits: Whether gradients wait in them for the last of several backwards.
    """

    def __init__(
        self, world: World, units: Sequence[Units], row: Sequence[Action], *, gradient: int, weight: int, bucket: int
    ) -> None:
        self._row = row
        self._sizes = [gradient * one.whole for one in units]
        self._tensors = [[gradient * size for size in one.largest] for one in units]
        self._bucket = bucket
        self._packed = [_packed(one.sizes, gradient, bucket // weight) for one in units] if world.sharded else []
        self._full = gradient * (bucket // weight)
        self._usual = [gradient * one.usual for one in units]
        self._kinds = 2 if world.experts else 1
        self._channels = (world.servers or 1) + self._kinds - 1
        ends = [action.stage for action in row if action.op is Op.REDUCE_GRAD]
        self.waits = any(count > 1 for counts in self._rounds().values() for count in counts)
        self.has_buckets = world.reduces and (world.frees_buckets or len(set(ends)) < len(ends))

    def peak(self) -> int:
        """Return the most bytes of gradients in buckets at a time.

        In a round of several backwards the gradients of the whole stage wait for the last one. In a round of one,
        buckets are reduced while they are made: some are under way, and one is filled, or one for each parameter
        server.
        """
        rounds = self._rounds()
        passing = {stage: self._passing(stage, len(counts)) for stage, counts in rounds.items()}
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
                most = max(most, now if several else now + passing[stage])
            elif op is Op.REDUCE_GRAD:
                at[stage] += 1
                if stage in opened:
                    opened.remove(stage)
                    now -= self._sizes[stage]
        return most

    def _passing(self, stage: int, rounds: int) -> int:
        """Return the most bytes in buckets during a backward that ends a round; a round before may be under way.

        With ZeRO a bucket waits until those that are under way have left memory for it: that of the
        largest gradient and of a unit, or of a few full buckets if that is more.
        """
        size = self._sizes[stage]
        if self._packed:
            in_turn = self._packed[stage] * min(rounds, UNDER_WAY + 1)
            open_too = min(self._bucket, size) * (self._kinds - 1)
            most = max((sum(in_turn[at : at + UNDER_WAY + 1]) for at in range(len(in_turn))), default=0)
            largest = max(self._tensors[stage], default=0)
            return min(open_too + most, most_in_buckets(largest, self._usual[stage], self._full))
        bucket = min(self._bucket, -(-size // self._channels))
        count = self._channels + UNDER_WAY
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


def _packed(sizes: Sequence[TensorSize], gradient: int, limit: int) -> list[int]:
    """Return the bytes of the gradients of each bucket, in the order in which a backward fills them.

    Args:
        sizes: The tensors of a stage, in the order in which forwards use them.
        gradient: The bytes of an element of a gradient.
        limit: The most elements of a bucket that has several tensors.
    """
    kinds = portions_by_kind(reversed(sizes), lambda one: one.is_expert, lambda one: one.elements, limit)
    return [gradient * sum(one.elements for one in portion) for _, portion in kinds]
