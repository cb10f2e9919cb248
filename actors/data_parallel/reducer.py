"""Sum gradients over the replicas of a pipeline rank, overlapped with its last backwards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.actors.collective.group import Handle
from raypar.actors.data_parallel.buckets import Bucket
from raypar.actors.device import Place
from raypar.actors.specs.results import Span
from raypar.actors.tensors import nbytes
from raypar.schedules.action import Action, Op


class Channel(NamedTuple):
    """The operations that sum the gradients of one owner over the replicas.

    Attributes:
        start: Starts the reduction of a flat tensor (n,) in place: an all_reduce, or a reduce to one server or replica.
        tell: Starts the same operation for a small tensor on the host.
        empty: Allocates a flat tensor, given the number of elements and the dtype, that ``start`` can communicate
            without a copy.
        here: Whether this actor gets the sum.
    """

    start: Callable[[Tensor], Handle]
    tell: Callable[[Tensor], Handle]
    empty: Callable[[int, torch.dtype], Tensor]
    here: bool


@dataclass
class _Transfer:
    """A bucket whose reduction was started.

    Attributes:
        bucket: The bucket.
        flat: Its flat tensor, (elements of the bucket,).
        handle: The reduction under way.
        start: When the reduction was started, a mark of the device's clock (``Place.mark``).
        end: When the wait for it returned, likewise.
    """

    bucket: Bucket
    flat: Tensor
    handle: Handle
    start: float
    end: float = 0.0


class Reducer:
    """Reduces each bucket as soon as its last gradient is complete, during the last backward of its stage.

    From a stage's first backward on, its gradients are views of the buckets' flat tensors. So microbatches accumulate
    directly in the memory that is reduced, and that memory is allocated once for the whole run.

    Buckets are started in one fixed order, because all members of a group must call its collectives in the same order,
    and gradients may become complete in another order. Only the end of a backward shows that a parameter has no
    gradient, see ``flush``.

    Args:
        buckets: Buckets in the order of the stages' last backwards; within a stage, in the order in which the backward
            makes the gradients.
        channels: The channel of each bucket owner.
        place: The device that computes the gradients. Its clock times the transfers.

    Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.2.
    """

    def __init__(self, buckets: Sequence[Bucket], channels: Sequence[Channel], place: Place) -> None:
        self._buckets, self._channels, self._place = buckets, channels, place
        self._flats = [channels[bucket.owner].empty(bucket.size, bucket.grad_dtype) for bucket in buckets]
        self.begin()

    def begin(self) -> None:
        """Open a step, and drop what an interrupted step left behind."""
        self._missing: list[set[Tensor]] = [set(bucket.parameters.values()) for bucket in self._buckets]
        self._transfers: list[_Transfer] = []
        self._spent: list[tuple[float, float]] = []  # (start, end) marks: time spent here instead of on compute

    @contextmanager
    def watch(self, stage: int, *, last: bool, left: Collection[Tensor] | None = None) -> Iterator[None]:
        """Hook the parameters of a stage for the time of one backward: its first, its last, or both in one.

        In a stage's first backward, each gradient is moved into its bucket's flat tensor as soon as it is made. In its
        last backward each gradient is complete when it is made, and each complete bucket is started.

        Args:
            stage: Number of the stage.
            last: Whether this is the stage's last backward of the step.
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

    def places(self, stage: int) -> dict[Tensor, Tensor]:
        """Return for each parameter of a stage the view of a flat tensor, of its shape, for its gradient."""
        return {
            parameter: place
            for bucket, flat in zip(self._buckets, self._flats, strict=True)
            if bucket.stage == stage
            for parameter, place in bucket.places(flat)
        }

    def flush(self, stage: int) -> None:
        """Note that a stage's last backward is over and makes no more gradients, and start the complete buckets."""
        for missing, bucket in zip(self._missing, self._buckets, strict=True):
            if bucket.stage == stage:
                missing.clear()
        self._start()

    def finish(self) -> None:
        """Wait for every bucket, and replace the gradients by their sums over the replicas.

        A gradient is None afterwards if another actor gets its sum, or if no replica used the parameter.

        Raises:
            AssertionError: A stage was not flushed.
        """
        assert len(self._transfers) == len(self._buckets), "a stage was not flushed"
        for transfer in self._transfers:
            before = self._place.mark()
            transfer.handle.wait()
            transfer.end = self._place.mark()
            self._spent.append((before, transfer.end))
            if self._channels[transfer.bucket.owner].here:
                transfer.bucket.adopt(transfer.flat)
            else:
                transfer.bucket.disown()

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
    def spans(self) -> list[Span]:
        """One span for each bucket of this step, from the start of its reduction until its wait returned.

        Times are marks of the device's clock (``Place.mark``), not seconds.
        """
        return [
            Span(Action(one.bucket.stage, Op.REDUCE_GRAD, None), one.start, one.end, nbytes(one.flat), number)
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
        spent = sum(when(end) - when(start) for start, end in self._spent)
        return max(0.0, 1.0 - spent / under_way) if under_way else None

    def _made(self, number: int, name: str, parameter: Tensor) -> None:
        """Move a gradient into bucket ``number``."""
        self._buckets[number].move_in(name, self._flats[number])

    def _complete(self, number: int, name: str, parameter: Tensor) -> None:
        """Move a complete gradient into bucket ``number``, and start the buckets that are complete now."""
        if number < len(self._transfers):
            raise RuntimeError(
                f"{name} got a gradient twice in one backward, as reentrant checkpointing of a shared layer does: "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        self._made(number, name, parameter)
        self._missing[number].discard(parameter)
        self._start()

    def _start(self) -> None:
        """Start the complete buckets, in order, up to the first one that is not complete."""
        while (number := len(self._transfers)) < len(self._buckets) and not self._missing[number]:
            bucket, flat, start = self._buckets[number], self._flats[number], self._place.mark()
            bucket.fill(flat)
            self._transfers.append(_Transfer(bucket, flat, self._channels[bucket.owner].start(flat), start))
            self._spent.append((start, self._place.mark()))
