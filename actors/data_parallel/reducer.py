"""Sum gradients over the replicas of a pipeline rank, overlapped with its last backwards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.actors.collective.group import Waitable
from raypar.actors.data_parallel.buckets import Bucket
from raypar.actors.data_parallel.high_water import HighWater
from raypar.actors.data_parallel.sums import GradientSums
from raypar.actors.device import ComputeDevice
from raypar.actors.specs.results import Span
from raypar.actors.tensors import nbytes
from raypar.schedules.action import Action, Op
from raypar.schedules.float_sum import float_sum


class Channel(NamedTuple):
    """The operations that sum the gradients of one owner over the replicas; with a single one, they do nothing.

    Attributes:
        start: Starts the reduction of a flat tensor (n,) in place: an all_reduce, or a reduce to one server or replica.
        tell: Starts the same operation for a small tensor on the host.
        empty: Allocates a flat tensor, given the number of elements and the dtype, that ``start`` can communicate
            without a copy.
        here: Whether this actor gets the sum.
        finish: With hybrid sharding, starts the sum over the owners of the same weights, once a step and behind all
            reductions; else None.
    """

    start: Callable[[Tensor], Waitable]
    tell: Callable[[Tensor], Waitable]
    empty: Callable[[int, torch.dtype], Tensor]
    here: bool
    finish: Callable[[Tensor], Waitable] | None = None


class Complete:
    """An operation on a tensor that is complete from its start on, because there is nothing to do."""

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
        flat: Its flat tensor, (elements of the bucket,); None once it has arrived.
        handle: The reduction under way.
        num_bytes: Bytes of the flat tensor.
        start: When the reduction was started, a mark of the device's clock (``ComputeDevice.mark``).
        end: When the wait for it returned, likewise.
    """

    number: int
    bucket: Bucket
    flat: Tensor | None
    handle: Waitable
    num_bytes: int
    start: float
    end: float = 0.0


_MOST_LENT = 2  # reductions under way whose flat tensors are given back: more of them would cost more memory


class Reducer:
    """Reduces each bucket as soon as its last gradient is complete, during the last backward of its stage.

    From a stage's first backward on, its gradients are views of the buckets' flat tensors. So microbatches accumulate
    directly in the memory that is reduced.

    A stage is reduced once a step, or in several rounds, each of which ends with a REDUCE_GRAD of the stage. Flat
    tensors are kept for the whole run, or (``lends``) are lent from a bucket's first gradient until it is reduced.
    Then actors that do not get the sum hold no gradients afterwards, and the owner adds up the sums of all rounds.

    Buckets are started in one fixed order, because all members of a group must call its collectives in the same order,
    and gradients may become complete in another order. Only the end of a backward shows that a parameter has no
    gradient, see ``flush``.

    Args:
        buckets: Buckets in the order of the stages' last backwards; within a stage, in the order in which the backward
            makes the gradients.
        channels: The channel of each bucket owner.
        place: The device that computes the gradients. Its clock times the transfers.
        sums: The sums that this actor gets.
        rounds: The stages in the order in which a step reduces them; a stage comes once for each of its rounds.
        lends: Whether flat tensors are lent; with several rounds they are in any case.

    Attributes:
        sums: The sums that this actor gets.
        lent: The bytes of gradients in flat tensors that are lent; None if they are kept for the whole run.

    Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.2;
    Rajbhandari et al. 2020, "ZeRO", section 5.2 (P_os+g) for ``lends``.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        channels: Sequence[Channel],
        place: ComputeDevice,
        sums: GradientSums,
        rounds: Sequence[int] | None = None,
        *,
        lends: bool = False,
    ) -> None:
        self._buckets, self._channels, self._place, self.sums = buckets, channels, place, sums
        stages = list(dict.fromkeys(bucket.stage for bucket in buckets)) if rounds is None else list(rounds)
        self._order = [n for stage in stages for n, bucket in enumerate(buckets) if bucket.stage == stage]
        self._lends = lends or len(set(stages)) < len(stages)
        self.lent = HighWater() if self._lends else None
        self._flats = [None if self._lends else self._empty(number) for number in range(len(buckets))]
        self.begin()

    def begin(self) -> None:
        """Open a step, and drop what an interrupted step left behind."""
        self._missing: list[set[Tensor]] = [set(self._buckets[number].parameters.values()) for number in self._order]
        self._places: list[list[int]] = [[] for _ in self._buckets]  # by bucket, in the order, of rounds still to end
        for place, number in enumerate(self._order):
            self._places[number].append(place)
        self._transfers: list[_Transfer] = []
        self._arrived = 0  # number of transfers that were waited for
        self.sums.begin()
        self._spent: list[tuple[float, float]] = []  # (start, end) marks: time spent here instead of on compute
        if self.lent is not None:
            self._flats = [None] * len(self._buckets)
            self.lent.add(-self.lent.now)
            self.lent.begin()

    @contextmanager
    def watch(self, stage: int, *, last: bool, left: Collection[Tensor] | None = None) -> Iterator[None]:
        """Hook the parameters of a stage for the time of one backward: its first, its last, or both in one.

        In the first backward of a round, each gradient is moved into its bucket's flat tensor as soon as it is made. In
        the last backward of a round each gradient is complete when it is made, and each complete bucket is started.

        Args:
            stage: Number of the stage.
            last: Whether this is the stage's last backward of the round.
            left: Parameters whose gradients this backward still has to make; None means all. The gradients of the other
                parameters are treated as made already.

        Raises:
            RuntimeError: A parameter got a second gradient in the last backward after its bucket was started.
        """
        arrived = self._complete if last else self._made
        with ExitStack() as hooks:
            for number, bucket in enumerate(self._buckets):
                for name, parameter in bucket.parameters.items() if bucket.stage == stage else ():
                    if left is None or parameter in left:
                        hook = parameter.register_post_accumulate_grad_hook(partial(arrived, number, name))
                        hooks.callback(hook.remove)
                    else:
                        arrived(number, name, parameter)
            yield

    def places(self, stage: int) -> dict[Tensor, Callable[[], Tensor]]:
        """Return for each parameter of a stage what returns the view of a flat tensor, of its shape, for its gradient.

        Parameters whose gradients are added up in another dtype have none. A flat tensor may be lent only then.
        """
        return {
            parameter: partial(self._place_in, number, name)
            for number, bucket in enumerate(self._buckets)
            if bucket.stage == stage and bucket.grad_dtype == bucket.dtype
            for name, parameter in bucket.parameters.items()
        }

    def flush(self, stage: int) -> None:
        """Note that the last backward of a stage's round is over, and start the complete buckets."""
        for number, bucket in enumerate(self._buckets):
            if bucket.stage == stage and self._places[number]:
                self._missing[self._places[number].pop(0)].clear()
        self._start()

    def finish(self) -> None:
        """Wait for every bucket, and replace the gradients by their sums over the replicas.

        A gradient is None afterwards if another actor gets its sum, or if no replica used the parameter.

        Raises:
            AssertionError: A stage was not flushed.
        """
        assert len(self._transfers) == len(self._order), "a stage was not flushed"
        self._collect(0)
        finishing = [
            self.sums.finish(number, finish, partial(self._empty, number))
            for number, bucket in enumerate(self._buckets)
            if number in self.sums and (finish := self._channels[bucket.owner].finish) is not None
        ]
        for handle in finishing:
            if handle is not None:
                self._wait(handle)
        self.sums.hand_over()

    def settle(self, *, whole: bool = False) -> None:
        """Wait for all started reductions of a step that is given up, and ignore their results.

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

        If the buckets have several owners, only the first one gets the sum.

        Args:
            tensor: A tensor of any shape and dtype.
        """
        self._channels[0].tell(tensor).wait()

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradients that this actor keeps: of all, or, if flat tensors are lent, of the sums."""
        return sum(bucket.num_bytes for bucket in self._buckets) if self.lent is None else self.sums.num_bytes

    @property
    def names(self) -> frozenset[str]:
        """Logical names of the parameters whose gradients it reduces."""
        return frozenset(name for bucket in self._buckets for name in bucket.parameters)

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
        """Fraction of the communication time that was hidden behind compute, from 0 to 1. None if there are no buckets.

        It is 1 - (seconds spent on starting buckets and waiting for them) / (seconds in which at least one bucket was
        being reduced). A second in which several buckets are being reduced counts once.
        """
        when, under_way, reached = self._place.seconds, 0.0, 0.0
        for transfer in self._transfers:
            start, end = when(transfer.start), when(transfer.end)
            under_way += max(0.0, end - max(reached, start))
            reached = max(reached, end)
        spent = float_sum(when(end) - when(start) for start, end in self._spent)
        return max(0.0, 1.0 - spent / under_way) if under_way else None

    def _empty(self, number: int) -> Tensor:
        """Allocate the flat tensor of a bucket."""
        bucket = self._buckets[number]
        return self._channels[bucket.owner].empty(bucket.size, bucket.grad_dtype)

    def _flat(self, number: int) -> Tensor:
        """Return the flat tensor of a bucket, which may be lent only now."""
        flat = self._flats[number]
        if flat is None:
            flat = self._flats[number] = self._empty(number)
            if self.lent is not None:
                self.lent.add(self._buckets[number].num_bytes)
        return flat

    def _place_in(self, number: int, name: str) -> Tensor:
        """Return the view of a bucket's flat tensor for the gradient of a parameter."""
        return self._buckets[number].place(name, self._flat(number))

    def _made(self, number: int, name: str, parameter: Tensor) -> None:
        """Move a gradient into bucket ``number``."""
        self._buckets[number].move_in(name, self._flat(number))

    def _complete(self, number: int, name: str, parameter: Tensor) -> None:
        """Move a complete gradient into bucket ``number``, and start the buckets that are complete now."""
        place = self._places[number][0]
        if place < len(self._transfers):
            raise RuntimeError(
                f"{name} got a gradient twice in one backward, as reentrant checkpointing of a shared layer does: "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        self._made(number, name, parameter)
        self._missing[place].discard(parameter)
        self._start()

    def _start(self) -> None:
        """Start the complete buckets, in order, up to the first one that is not complete."""
        while (place := len(self._transfers)) < len(self._order) and not self._missing[place]:
            number = self._order[place]
            bucket, flat, start = self._buckets[number], self._flat(number), self._place.mark()
            bucket.fill(flat)
            handle = self._channels[bucket.owner].start(flat)
            self._transfers.append(_Transfer(number, bucket, flat, handle, nbytes(flat), start))
            self._spent.append((start, self._place.mark()))
            if self._lends:
                bucket.disown()
                self._flats[number] = None
                self._collect(_MOST_LENT)

    def _collect(self, most: int) -> None:
        """Wait for the oldest reductions until at most ``most`` are under way, and keep or add up what arrives here."""
        while len(self._transfers) - self._arrived > most:
            transfer = self._transfers[self._arrived]
            assert transfer.flat is not None
            transfer.end = self._wait(transfer.handle)
            number, flat, transfer.flat = transfer.number, transfer.flat, None
            if self._channels[transfer.bucket.owner].here:
                self.sums.add(number, flat)
            self._arrived += 1
            if self.lent is not None:
                self.lent.add(-transfer.bucket.num_bytes)

    def _wait(self, handle: Waitable) -> float:
        """Wait for a communication, and return the mark of its end."""
        before = self._place.mark()
        handle.wait()
        after = self._place.mark()
        self._spent.append((before, after))
        return after
