"""Sum gradients over the replicas of a pipeline rank, overlapped with its last backwards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.actors.bucket_bounds import UNDER_WAY
from raypar.actors.collective.flat_cut import FlatCut
from raypar.actors.collective.group import Waitable
from raypar.actors.data_parallel.buckets import Bucket, CutBucket
from raypar.actors.data_parallel.sums import GradientSums
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.machine.high_water import HighWater
from raypar.actors.specs.results import Span
from raypar.actors.tensors import nbytes
from raypar.schedules.action import Action, Op
from raypar.schedules.float_sum import float_sum


class Channel(NamedTuple):
    """The operations that sum gradients over the replicas, for all or for one server; no-ops if there is one replica.

    Attributes:
        start: Starts the reduction of a flat tensor (n,) in place: an all_reduce, or a reduce to a server.
        sum_on_host: Starts the same operation for a small tensor on the host.
        empty: Allocates a flat tensor, given the number of elements and the dtype, that ``start`` can communicate
            without a copy.
        gets_sum: Whether this actor gets the sum.
        finish: With hybrid sharding, starts the sum over the replicas that update the same parts, once a step after
            all reductions; else None.
        scatter: Starts the reduction of a flat tensor of which each replica gets its part, as
            ``Group.reduce_scatter_cut``; None if a replica gets all of it or nothing.
    """

    start: Callable[[Tensor], Waitable]
    sum_on_host: Callable[[Tensor], Waitable]
    empty: Callable[[int, torch.dtype], Tensor]
    gets_sum: bool
    finish: Callable[[Tensor], Waitable] | None = None
    scatter: Callable[[Tensor | None, Tensor, FlatCut], Waitable] | None = None


class Complete:
    """An operation on a tensor that is complete at once, because there is one replica."""

    def __init__(self, tensor: Tensor) -> None:
        pass

    def wait(self) -> None:
        """Return at once."""


@dataclass
class _Transfer:
    """A bucket whose reduction was started.

    Attributes:
        number: The bucket's number.
        bucket: The bucket.
        flat: Its flat tensor, (size of the bucket,); None once the reduction is complete.
        total: The tensor in which the sum is then: the flat tensor, or this actor's part.
        handle: Handle of the reduction.
        num_bytes: Bytes of the flat tensor.
        start: Start of the reduction, a mark of the device's clock (``ComputeDevice.mark``).
        end: Return of the wait for it, a mark of the same clock.
    """

    number: int
    bucket: Bucket
    flat: Tensor | None
    total: Tensor | None
    handle: Waitable
    num_bytes: int
    start: float
    end: float = 0.0


@dataclass(eq=False)
class Reducer:
    """Reduces each bucket as soon as its last gradient is complete, during the last backward of its stage.

    From a stage's first backward on, its gradients are views of the buckets' flat tensors. So microbatches accumulate
    directly in the memory that is reduced.

    A stage is reduced once a step, or in several rounds, each of which ends with a REDUCE_GRAD of the stage. Flat
    tensors are kept for the whole run, or (``frees_buckets``) are allocated at a bucket's first gradient and freed
    after its reduction. Then actors hold no gradients but the sums that they get, or their parts of them, and add up
    those of all rounds.

    Buckets are started in one fixed order, because all members of a group must call its collectives in the same order;
    gradients may become complete in another order. That a parameter has no gradient is known only at the end of a
    backward, see ``flush``.

    Attributes:
        buckets: Buckets in the order of the stages' last backwards; within a stage, in the order in which the backward
            computes the gradients.
        channels: The channels by number: see ``Bucket.channel``.
        device: The device that computes the gradients. Its clock times the transfers.
        sums: The sums that this actor gets.
        rounds: The stages in the order in which a step reduces them; a stage comes once for each of its rounds.
        frees_buckets: Whether flat tensors are freed after each reduction; with several rounds they always are.
        most_bytes: By stage, the bytes of gradients in flat tensors that are freed for which none is allocated while
            reductions are under way. A stage that is missing has no limit.
        bucket_bytes: The bytes of gradients in flat tensors that are freed; None if they are kept for the whole run.

    Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.2;
    Rajbhandari et al. 2020, "ZeRO", section 5.2 (P_os+g) for ``frees_buckets``.
    """

    buckets: Sequence[Bucket]
    channels: Sequence[Channel]
    device: ComputeDevice
    sums: GradientSums
    rounds: Sequence[int] | None = None
    frees_buckets: bool = False
    most_bytes: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stages = list(dict.fromkeys(one.stage for one in self.buckets)) if self.rounds is None else list(self.rounds)
        self._order = [n for stage in stages for n, bucket in enumerate(self.buckets) if bucket.stage == stage]
        self.frees_buckets |= len(set(stages)) < len(stages)
        self._parts: dict[int, Tensor] = {}  # by bucket, memory for this actor's part of the sum, kept for all steps
        self.bucket_bytes = HighWater() if self.frees_buckets else None
        self._flats = [None if self.frees_buckets else self._empty(number) for number in range(len(self.buckets))]
        self.begin()

    def begin(self) -> None:
        """Begin a step, and drop the state of an interrupted one."""
        self._missing: list[set[Tensor]] = [set(self.buckets[number].parameters.values()) for number in self._order]
        self._positions: list[list[int]] = [[] for _ in self.buckets]  # by bucket, of open rounds
        for position, number in enumerate(self._order):
            self._positions[number].append(position)
        self._transfers: list[_Transfer] = []
        self._arrived = 0  # number of transfers that were waited for
        self.sums.begin()
        self._spent: list[tuple[float, float]] = []  # (start, end) marks: time spent here instead of on compute
        if self.bucket_bytes is not None:
            self._flats = [None] * len(self.buckets)
            self.bucket_bytes.add(-self.bucket_bytes.now)
            self.bucket_bytes.begin()

    @contextmanager
    def watch(self, stage: int, *, last: bool, left: Collection[Tensor] | None = None) -> Iterator[None]:
        """Hook the parameters of a stage during one backward: its first, its last, or both in one.

        In the first backward of a round, each gradient is moved into its bucket's flat tensor once it is computed.
        In the last backward of a round each gradient is then complete, and each complete bucket is started.

        Args:
            stage: Number of the stage.
            last: Whether this is the stage's last backward of the round.
            left: Parameters whose gradients this backward computes; None means all. The gradients of all other
                parameters are treated as computed already.

        Raises:
            RuntimeError: A parameter got a second gradient in the last backward after its bucket was started.
        """
        arrived = self._complete if last else self._move_in
        with ExitStack() as hooks:
            for number, bucket in enumerate(self.buckets):
                for name, parameter in bucket.parameters.items() if bucket.stage == stage else ():
                    if left is None or parameter in left:
                        hook = parameter.register_post_accumulate_grad_hook(partial(arrived, number, name))
                        hooks.callback(hook.remove)
                    else:
                        arrived(number, name, parameter)
            yield

    def gradient_views(self, stage: int) -> dict[Tensor, Callable[[], Tensor]]:
        """Return, for each parameter of a stage, a function that returns the view of a flat tensor for its gradient.

        The view has the parameter's shape; a call allocates the flat tensor if need be. Parameters whose gradients are
        accumulated in another dtype have no function.
        """
        return {
            parameter: partial(self._view, number, name)
            for number, bucket in enumerate(self.buckets)
            if bucket.stage == stage and bucket.grad_dtype == bucket.dtype
            for name, parameter in bucket.parameters.items()
        }

    def flush(self, stage: int) -> None:
        """Note that the last backward of a stage's round is over, and start the complete buckets."""
        for number, bucket in enumerate(self.buckets):
            if bucket.stage == stage and self._positions[number]:
                self._missing[self._positions[number].pop(0)].clear()
        self._start()

    def finish(self) -> None:
        """Wait for every bucket.

        Raises:
            AssertionError: A stage was not flushed.
        """
        assert len(self._transfers) == len(self._order), "a stage was not flushed"
        self._collect(0)
        finishing = [
            self.sums.finish(number, channel.finish, channel.empty)
            for number, bucket in enumerate(self.buckets)
            if number in self.sums and (channel := self.channels[bucket.channel]).finish is not None
        ]
        for handle in finishing:
            if handle is not None:
                self._wait(handle)

    def hand_over(self) -> None:
        """Replace the gradients by their sums over the replicas, after ``finish``.

        A gradient is None afterwards if another actor gets its sum, or if no replica used the parameter. On a GPU it
        waits for the reductions.
        """
        self.sums.hand_over(self.device)

    def settle(self, *, whole: bool = False) -> None:
        """Wait for all started reductions of an aborted step, and ignore their results.

        They must finish, because every other replica has started them too.

        Args:
            whole: Start the step's remaining buckets first. Parameter servers need this: they receive either all
                buckets of a step or none.
        """
        if whole:
            for missing in self._missing:
                missing.clear()
            self._start()
        for transfer in self._transfers:
            transfer.handle.wait()

    def total(self, tensor: Tensor) -> None:
        """Sum a small tensor on the host over the replicas, in place.

        With several parameter servers only the first one gets the sum, and with ZeRO only the first replica.

        Args:
            tensor: A tensor of any shape and dtype.
        """
        self.channels[0].sum_on_host(tensor).wait()

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradients that this actor keeps: of all, or, if flat tensors are freed, of the sums.

        The memory that is kept for its parts of sums over copies of the shards counts, too.
        """
        if self.bucket_bytes is not None:
            return self.sums.num_bytes
        return sum(bucket.num_bytes for bucket in self.buckets) + sum(map(nbytes, self._parts.values()))

    @property
    def names(self) -> frozenset[str]:
        """Logical names of the parameters whose gradients are reduced."""
        return frozenset(name for bucket in self.buckets for name in bucket.parameters)

    @property
    def spans(self) -> list[Span]:
        """One span for each bucket of this step, from the start of its reduction until its wait returned.

        Times are marks of the device's clock (``ComputeDevice.mark``), not seconds.
        """
        return [
            Span(Action(one.bucket.stage, Op.REDUCE_GRAD, None), one.start, one.end, one.num_bytes, number)
            for number, one in enumerate(self._transfers)
        ]

    @property
    def overlap(self) -> float | None:
        """Fraction of the communication time that overlapped with compute, from 0 to 1. None if there are no buckets.

        It is 1 - (seconds spent on starting buckets and waiting for them) / (seconds in which at least one bucket was
        being reduced). A second in which several buckets are being reduced counts once.
        """
        when, under_way, reached = self.device.seconds, 0.0, 0.0
        for transfer in self._transfers:
            start, end = when(transfer.start), when(transfer.end)
            under_way += max(0.0, end - max(reached, start))
            reached = max(reached, end)
        spent = float_sum(when(end) - when(start) for start, end in self._spent)
        return max(0.0, 1.0 - spent / under_way) if under_way else None

    def _empty(self, number: int) -> Tensor:
        """Allocate the flat tensor of a bucket."""
        bucket = self.buckets[number]
        return self.channels[bucket.channel].empty(bucket.size, bucket.grad_dtype)

    def _flat(self, number: int) -> Tensor:
        """Return the flat tensor of a bucket; allocate it if need be, once there is memory for it."""
        flat = self._flats[number]
        if flat is None:
            if self.bucket_bytes is not None:
                self._make_room(self.buckets[number], self.bucket_bytes)
            flat = self._flats[number] = self._empty(number)
        return flat

    def _make_room(self, bucket: Bucket, there: HighWater) -> None:
        """Wait until a bucket fits among those that are there, or no reduction is under way; and count it."""
        most = self.most_bytes.get(bucket.stage)
        while most is not None and there.now + bucket.num_bytes > most and self._arrived < len(self._transfers):
            self._collect(len(self._transfers) - self._arrived - 1)
        there.add(bucket.num_bytes)

    def _view(self, number: int, name: str) -> Tensor:
        """Return the view of a bucket's flat tensor for the gradient of a parameter."""
        return self.buckets[number].view(name, self._flat(number))

    def _move_in(self, number: int, name: str, parameter: Tensor) -> None:
        """Move a gradient into bucket ``number``."""
        self.buckets[number].move_in(name, self._flat(number))

    def _complete(self, number: int, name: str, parameter: Tensor) -> None:
        """Move a complete gradient into bucket ``number``, and start the buckets that are complete now."""
        position = self._positions[number][0]
        if position < len(self._transfers):
            raise RuntimeError(
                f"{name} got a gradient twice in one backward, as reentrant checkpointing of a shared layer does: "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        self._move_in(number, name, parameter)
        self._missing[position].discard(parameter)
        self._start()

    def _start(self) -> None:
        """Start the complete buckets, in order, up to the first one that is not complete."""
        while (position := len(self._transfers)) < len(self._order) and not self._missing[position]:
            number = self._order[position]
            bucket, flat, start = self.buckets[number], self._flat(number), self.device.mark()
            bucket.fill(flat)
            handle, total = self._reduce(number, flat)
            self._transfers.append(_Transfer(number, bucket, flat, total, handle, nbytes(flat), start))
            self._spent.append((start, self.device.mark()))
            if self.frees_buckets:
                bucket.drop_gradients()
                self._flats[number] = None
                self._collect(UNDER_WAY)

    def _reduce(self, number: int, flat: Tensor) -> tuple[Waitable, Tensor]:
        """Start the reduction of a bucket, and return the tensor that has what this actor gets of the sum."""
        bucket = self.buckets[number]
        channel = self.channels[bucket.channel]
        if channel.scatter is None or not isinstance(bucket, CutBucket):
            return channel.start(flat), flat
        part = None
        if self.frees_buckets or channel.finish is not None:
            part = self._parts.get(number)
            if part is None:
                part = channel.empty(bucket.layout.summed_count, flat.dtype)
            if not self.frees_buckets:
                self._parts[number] = part
        return channel.scatter(part, flat, bucket.layout.summed), flat if part is None else part

    def _collect(self, most: int) -> None:
        """Wait for the oldest reductions until at most ``most`` are left, and add the sums that this actor gets."""
        while len(self._transfers) - self._arrived > most:
            transfer = self._transfers[self._arrived]
            assert transfer.total is not None
            transfer.end = self._wait(transfer.handle)
            if self.channels[transfer.bucket.channel].gets_sum:
                self.sums.add(transfer.number, transfer.total)
            transfer.flat = transfer.total = None
            self._arrived += 1
            if self.bucket_bytes is not None:
                self.bucket_bytes.add(-transfer.bucket.num_bytes)

    def _wait(self, handle: Waitable) -> float:
        """Wait for a communication, and return the mark of its end."""
        before = self.device.mark()
        handle.wait()
        after = self.device.mark()
        self._spent.append((before, after))
        return after
