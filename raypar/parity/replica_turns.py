"""Forwards of several replicas in one process, which take turns where they exchange values (``rp.replicas``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

import torch
from torch import Tensor

from raypar.actors.autograd.recompute import drawn_again
from raypar.actors.collective.replicas import ReplicaCallError, ReplicaMembers

T = TypeVar("T")
Forward = Callable[[int, ReplicaMembers], T]  # computes a microbatch of a replica
Join = Callable[[list[Tensor]], Tensor]


class ReplicaTurns:
    """Computes forwards of replicas, each in a thread, of which one runs at a time.

    Args:
        count: Number of replicas.
        device: Device of the random numbers that the forwards draw.
        context: Returns the context in which a thread computes.
    """

    def __init__(self, count: int, device: torch.device, context: Callable[[], AbstractContextManager[object]]) -> None:
        self._count, self._device, self._context = count, device, context

    def compute(self, first: int, forward: Forward[T], resumed: Callable[[int], object]) -> dict[int, T]:
        """Compute the forward of one replica and, if it exchanges values, of all others.

        The results have one graph, through which gradients reach the others' inputs.

        Args:
            first: The replica.
            forward: Computes the forward of a replica.
            resumed: Called with a replica before its forward goes on after an exchange.

        Returns:
            The results by replica.

        Raises:
            ReplicaCallError: The replicas make different calls. Errors of a forward are raised as they are.
        """
        turns = dict[int, _Turn[T]]()
        try:
            for index in (first, *(one for one in range(self._count) if one != first)):
                turns[index] = _Turn(index, self._count, forward, self._device, self._context)
                turns[index].advance()
                if turns[first].call is None:
                    break
            turns = dict(sorted(turns.items()))
            while any(turn.call is not None for turn in turns.values()):
                _exchange(turns)
                for index, turn in turns.items():
                    resumed(index)
                    turn.advance()
            return {index: turn.made[0] for index, turn in turns.items()}
        finally:
            for turn in turns.values():
                turn.end()


class _EndedError(BaseException):
    """Another forward has failed. No layer catches it."""


class _Turn(ReplicaMembers, Generic[T]):
    """The forward of one replica.

    Attributes:
        made: What it returned; empty until then.
        call: The call that it waits in; None if there is none.
    """

    def __init__(
        self,
        index: int,
        count: int,
        forward: Forward[T],
        device: torch.device,
        context: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.index, self.count = index, count
        self.made: list[T] = []
        self.call: str | None = None
        self._device = device
        self._given, self._answer = torch.empty(0), torch.empty(0)
        self._join: Join = torch.cat
        self._error: BaseException | None = None
        self._is_ended = False
        self._goes, self._stops = threading.Semaphore(0), threading.Semaphore(0)
        arguments = forward, context, torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, args=arguments, name=f"replica {index}", daemon=True)
        self._thread.start()

    def advance(self) -> None:
        """Go on to the next call, or to the end. Raises what the forward raises."""
        self._goes.release()
        self._stops.acquire()
        if self._error is not None:
            raise self._error

    def answer(self, turns: Mapping[int, _Turn[T]]) -> None:
        """Take the result of the call that all replicas wait in."""
        self._answer = self._join([turn._given for turn in turns.values()])

    def end(self) -> None:
        """End the thread."""
        self._is_ended = True
        self._goes.release()
        self._thread.join()

    def gathered(self, x: Tensor, call: str) -> Tensor:
        return self._exchanged(x, call, torch.cat)

    def summed(self, x: Tensor, call: str) -> Tensor:
        return self._exchanged(x, call, lambda every: torch.stack(every).sum(0))

    def _exchanged(self, x: Tensor, call: str, join: Join) -> Tensor:
        redraw = drawn_again(self._device)
        self.call = f"{call} of {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        self._given, self._join = x, join
        self._stops.release()
        self._goes.acquire()
        if self._is_ended:
            raise _EndedError
        self.call = None
        redraw()
        return self._answer

    def _run(
        self, forward: Forward[T], context: Callable[[], AbstractContextManager[object]], num_threads: int
    ) -> None:
        self._goes.acquire()
        try:
            if not self._is_ended:
                torch.set_num_threads(num_threads)
                with context():
                    self.made.append(forward(self.index, self))
        except _EndedError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.call = None
            self._stops.release()


def _exchange(turns: Mapping[int, _Turn[T]]) -> None:
    """Answer the call that all replicas wait in. Raises ReplicaCallError if they wait in several."""
    calls = {index: turn.call or "no call any more" for index, turn in turns.items()}
    other = next((index for index, call in calls.items() if call != calls[0]), None)
    if other is not None:
        raise ReplicaCallError(
            f"replica 0 is in {calls[0]}, and replica {other} in {calls[other]}: every replica must make the same "
            "calls in the same order, with tensors of one shape and dtype"
        )
    for turn in turns.values():
        turn.answer(turns)
