"""Collectives over data-parallel replicas for layers and losses of users: ``rp.replicas``.

A stage sets which replicas there are, and the name of a layer, before it runs the layer: ``enter``. Without that there
is one replica. Each call is compared on all replicas before it communicates, by a text of a fixed length.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from raypar.actors.collective.autograd import all_gathered, all_reduced, reduce_scattered, through
from raypar.actors.collective.errors import GroupError
from raypar.actors.collective.group import Group

Reduction = Literal["sum", "mean", "max"]
CALL_BYTES = 128  # of the text that says what a replica calls
_ANYWHERE = "your code"


class ReplicaCallError(RuntimeError):
    """Replicas call different collectives, or with different shapes."""


class ReplicaMembers(ABC):
    """The replicas that compute the same layer, each for a microbatch of its own, as one of them.

    Attributes:
        index: This replica's number, from 0.
        count: Number of replicas.
        latest: The latest call, for messages; "" before the first.
    """

    index: int
    count: int
    latest: str = ""

    @abstractmethod
    def gathered(self, x: Tensor, call: str) -> Tensor:
        """Concatenate the replicas' tensors (n, ...) in their order: (count * n, ...), with a gradient.

        Args:
            x: This replica's tensor, of one shape and dtype on all replicas.
            call: Which call it is, for messages.
        """

    @abstractmethod
    def summed(self, x: Tensor, call: str) -> Tensor:
        """Sum the replicas' tensors, with a gradient. The arguments are those of ``gathered``."""


class RefusedReplicas(ReplicaMembers):
    """Replicas that cannot exchange values; every use raises ValueError.

    Args:
        reason: Why they cannot, and the fix.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    @property
    def index(self) -> int:  # type: ignore[override]
        raise self._error("rp.replicas.index")

    @property
    def count(self) -> int:  # type: ignore[override]
        raise self._error("rp.replicas.count")

    def gathered(self, x: Tensor, call: str) -> Tensor:
        raise self._error(call)

    def summed(self, x: Tensor, call: str) -> Tensor:
        raise self._error(call)

    def _error(self, call: str) -> ValueError:
        self.latest = call
        return ValueError(f"rp.replicas: {self._reason}")


class RepeatedReplicas(ReplicaMembers):
    """Replicas that all have the tensors of this one, to try what a layer makes of them.

    Args:
        count: Number of replicas.
    """

    def __init__(self, count: int) -> None:
        self.index, self.count = 0, count

    def gathered(self, x: Tensor, call: str) -> Tensor:
        self.latest = call
        return torch.cat([x] * self.count)

    def summed(self, x: Tensor, call: str) -> Tensor:
        self.latest = call
        return x * self.count


class GroupReplicas(ReplicaMembers):
    """Replicas on actors of their own, the members of a group.

    Args:
        group: The group, in the order of the replicas.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.index, self.count = group.rank, group.size

    def gathered(self, x: Tensor, call: str) -> Tensor:
        there, back = partial(all_gathered, self._group, 0), partial(reduce_scattered, self._group, 0)
        return through(x, self._agreed(call, there), self._agreed(f"{call}, backward", back))

    def summed(self, x: Tensor, call: str) -> Tensor:
        there = partial(all_reduced, self._group)
        return through(x, self._agreed(call, there), self._agreed(f"{call}, backward", there))

    def _agreed(self, call: str, move: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return a function that applies ``move`` to a tensor if all replicas make the same call."""

        def agreed(x: Tensor) -> Tensor:
            self.latest = call
            try:
                self._compare(f"{call} of {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}")
                return move(x)
            except GroupError as error:
                reason = f"{error.reason}, in {call}, which every replica must call"
                raise GroupError(error.group, error.op, error.peer, reason) from error

        return agreed

    def _compare(self, call: str) -> None:
        """Raise ReplicaCallError unless all replicas make the same call."""
        own = bytearray(call.encode()[:CALL_BYTES].ljust(CALL_BYTES))
        every = torch.empty(self.count * CALL_BYTES, dtype=torch.uint8)
        self._group.host.all_gather(every, torch.frombuffer(own, dtype=torch.uint8)).wait()
        calls = [bytes(one.tolist()) for one in every.view(self.count, CALL_BYTES)]
        other = next((index for index, one in enumerate(calls) if one != own), None)
        if other is not None:
            theirs = calls[other].decode(errors="replace").strip()
            raise ReplicaCallError(
                f"replica {self.index} calls {call}, and replica {other} {theirs}: every replica must make the same "
                "calls in the same order, with tensors of one shape and dtype"
            )


class _Present(threading.local):
    """What ``rp.replicas`` is in a thread now: the replicas, None if there is one, and where the call comes from."""

    members: ReplicaMembers | None = None
    place: str = _ANYWHERE


_present = _Present()


def enter(members: ReplicaMembers | None, place: str) -> None:
    """Set of which replicas the code is that this thread calls next.

    Args:
        members: The replicas; None if there is one.
        place: The layer, or the loss, for messages.
    """
    _present.members, _present.place = members, place


def enter_none() -> None:
    """Set that the code that this thread calls next is of no run."""
    enter(None, _ANYWHERE)


@contextmanager
def entered(members: ReplicaMembers | None, place: str = _ANYWHERE) -> Iterator[None]:
    """Return a context around code that is of some replicas; see ``enter``."""
    before = _present.members, _present.place
    enter(members, place)
    try:
        yield
    finally:
        enter(*before)


class Replicas:
    """Collectives over the data-parallel replicas, for a layer's ``forward`` and for a loss.

    Every replica must make the same calls in the same order, with tensors of one shape and dtype, in training and in
    evaluations. They are differentiable, and do nothing with one replica, or outside of a run.
    """

    @property
    def index(self) -> int:
        """The number of the replica whose microbatch is computed, from 0."""
        return 0 if _present.members is None else _present.members.index

    @property
    def count(self) -> int:
        """Number of replicas."""
        return 1 if _present.members is None else _present.members.count

    def all_gather(self, t: Tensor) -> Tensor:
        """Concatenate the replicas' tensors along the first dimension, in the order of the replicas.

        The gradient with respect to ``t`` is the sum of those of all replicas with respect to this replica's rows.

        Args:
            t: This replica's tensor (n, ...), of any dtype.

        Returns:
            The tensors of all replicas (count * n, ...).

        Raises:
            ValueError: ``t`` has no dimension, or this run's replicas cannot exchange values.
        """
        if t.dim() == 0:
            raise ValueError("rp.replicas.all_gather takes a tensor of one dimension or more: give t[None]")
        members = _present.members
        return t if members is None else members.gathered(t, self._call("all_gather"))

    def all_reduce(self, t: Tensor, op: Reduction = "sum") -> Tensor:
        """Reduce the replicas' tensors, element by element.

        The gradient is the sum of those of all replicas: of "mean" divided by their number, of "max" only where this
        replica's element is the largest one, divided by how many are.

        Args:
            t: This replica's tensor, of any shape.
            op: "sum", "mean" or "max".

        Returns:
            The same tensor on every replica, of the shape of ``t``.

        Raises:
            ValueError: There is no such ``op``, or this run's replicas cannot exchange values.
        """
        if op not in get_args(Reduction):
            raise ValueError(f"rp.replicas.all_reduce has no op {op!r}: use one of {', '.join(get_args(Reduction))}")
        members, call = _present.members, self._call(f"all_reduce {op}")
        if members is None:
            return t
        if op == "max":
            return members.gathered(t[None], call).amax(0)
        total = members.summed(t, call)
        return total / members.count if op == "mean" else total

    def _call(self, op: str) -> str:
        return f"rp.replicas.{op} in {_present.place}"


replicas = Replicas()
"""the collectives of the present replica, as ``rp.replicas``"""
