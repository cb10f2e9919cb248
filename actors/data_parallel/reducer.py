"""Sums gradients over the replicas of a pipeline rank while its last backwards still compute."""

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
    """How gradients are summed over the replicas.

    start  all_reduce, or reduce to a server or replica
    tell   the same for a small tensor on the host
    empty  makes a tensor (elements, dtype) for ``start``
    here   whether this actor gets the sum
    """

    start: Callable[[Tensor], Handle]
    tell: Callable[[Tensor], Handle]
    empty: Callable[[int, torch.dtype], Tensor]
    here: bool


@dataclass
class _Transfer:
    """A bucket under way, from one mark of the place to another."""

    bucket: Bucket
    flat: Tensor
    handle: Handle
    start: float
    end: float = 0.0


class Reducer:
    """Starts a bucket as soon as its last gradient is there, in the last backward of its stage (Li et al. 2020).

    From a stage's first backward on its gradients live in the buckets' flat tensors, which stay for the whole run: they
    add up where they are reduced. Buckets start in one fixed order, because the members of a group must call its ops in
    the same order, whichever gradients come first. A parameter without a gradient is found out when the backward is
    over: see ``flush``.

    buckets   in the order of the stages' last backwards; those of a stage in the order in which it makes gradients
    channels  by the owner of a bucket
    place     where the gradients are made, and whose clock tells when
    """

    def __init__(self, buckets: Sequence[Bucket], channels: Sequence[Channel], place: Place) -> None:
        self._buckets, self._channels, self._place = buckets, channels, place
        self._flats = [channels[bucket.owner].empty(bucket.size, bucket.dtype) for bucket in buckets]
        self.begin()

    def begin(self) -> None:
        """Open a step; what an interrupted one left behind is dropped."""
        self._missing: list[set[Tensor]] = [set(bucket.parameters.values()) for bucket in self._buckets]
        self._transfers: list[_Transfer] = []
        self._spent: list[tuple[float, float]] = []  # marks of the actor's own time, in which it did not compute

    @contextmanager
    def watch(self, stage: int, *, last: bool, left: Collection[Tensor] | None = None) -> Iterator[None]:
        """For the time of a stage's first backward, in which gradients move in, and of its last, in which they are
        complete as they come.

        ``left`` are the parameters whose gradients are still to come (None: all); those of the others are complete.
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
        """Where the gradients of a stage's parameters live."""
        return {
            parameter: place
            for bucket, flat in zip(self._buckets, self._flats, strict=True)
            if bucket.stage == stage
            for parameter, place in bucket.places(flat)
        }

    def flush(self, stage: int) -> None:
        """The stage has no more backwards: what has no gradient by now has none."""
        for missing, bucket in zip(self._missing, self._buckets, strict=True):
            if bucket.stage == stage:
                missing.clear()
        self._start()

    def finish(self) -> None:
        """Wait for every bucket; then the gradients are sums over the replicas, or None if those are elsewhere."""
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
        """Wait for what is under way, whatever becomes of it: every replica has started the same.

        whole  start the rest of the step's buckets, too: servers take all of them or none
        """
        if whole:
            for missing in self._missing:
                missing.clear()
            self._start()
        for transfer in self._transfers:
            transfer.handle.wait()

    def total(self, tensor: Tensor) -> None:
        """Sum a small tensor over the replicas; with several owners the sum is at the first one."""
        self._channels[0].tell(tensor).wait()

    @property
    def spans(self) -> list[Span]:
        """The buckets of this step, each from the start of its reduction to where it was known to be over; marked."""
        return [
            Span(Action(one.bucket.stage, Op.REDUCE_GRAD, None), one.start, one.end, nbytes(one.flat), number)
            for number, one in enumerate(self._transfers)
        ]

    @property
    def overlap(self) -> float | None:
        """1 - (seconds spent on starting buckets and waiting for them) / (seconds in which one was under way).

        None without buckets. Of a time in which several are under way each second counts once.
        """
        when, under_way, reached = self._place.seconds, 0.0, 0.0
        for transfer in self._transfers:
            start, end = when(transfer.start), when(transfer.end)
            under_way += max(0.0, end - max(reached, start))
            reached = max(reached, end)
        spent = sum(when(end) - when(start) for start, end in self._spent)
        return max(0.0, 1.0 - spent / under_way) if under_way else None

    def _made(self, number: int, name: str, parameter: Tensor) -> None:
        self._buckets[number].move_in(name, self._flats[number])

    def _complete(self, number: int, name: str, parameter: Tensor) -> None:
        if number < len(self._transfers):
            raise RuntimeError(
                f"{name} got a gradient twice in one backward, as reentrant checkpointing of a shared layer does: "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        self._made(number, name, parameter)
        self._missing[number].discard(parameter)
        self._start()

    def _start(self) -> None:
        """Start the buckets that are complete and have none before them that is not."""
        while (number := len(self._transfers)) < len(self._buckets) and not self._missing[number]:
            bucket, flat, start = self._buckets[number], self._flats[number], self._place.mark()
            bucket.fill(flat)
            self._transfers.append(_Transfer(bucket, flat, self._channels[bucket.owner].start(flat), start))
            self._spent.append((start, self._place.mark()))
