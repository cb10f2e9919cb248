"""The CPU group of raypar beside Gloo, operation by operation, in the same actors."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import torch
from torch import Tensor

from raypar.actors.collective.gloo.group import GlooGroup, create_device
from raypar.actors.collective.group import Group, GroupMember
from raypar.actors.collective.ray import ray_groups as groups
from tests.bench.calm import calmly

log = logging.getLogger(__name__)

KIB, MIB = 1 << 10, 1 << 20
NBYTES = (4 * KIB, 32 * KIB, 256 * KIB, 512 * KIB, MIB, 4 * MIB, 16 * MIB)
_PER_SAMPLE = 128 * MIB  # a sample repeats the operation until so many bytes have gone through it ...
_REPEATS = 20, 500  # ... but no less and no more often
_WARM_UP = 10  # per cent of the repeats that come before, and are not timed
_TIMEOUT = 60.0  # seconds


@dataclass(frozen=True)
class Buffers:
    """Tensors of an operation, fp32: ``whole`` and ``other`` have its bytes, ``part`` a member's share of them."""

    whole: Tensor
    other: Tensor
    part: Tensor


def buffers(nbytes: int, group: Group) -> Buffers:
    """Made by the group, as the trainer's are, and written once, so that their pages are there."""
    count = nbytes // 4
    lengths = (count, count, count // group.size)
    return Buffers(*(group.empty(length, torch.float32).fill_(0.0) for length in lengths))


def _ping_pong(group: Group, held: Buffers, _: int) -> None:
    """There and back between ranks 0 and 1."""
    if group.rank == 0:
        group.send(held.whole, 1).wait()
        group.recv(held.other, 1).wait()
    elif group.rank == 1:
        group.recv(held.other, 0).wait()
        group.send(held.whole, 0).wait()


# The root of a broadcast moves on, else the first roots would be ahead of everybody.
OPS: dict[str, Callable[[Group, Buffers, int], None]] = {
    "all_reduce": lambda group, held, _: group.all_reduce(held.whole).wait(),
    "all_gather": lambda group, held, _: group.all_gather(held.whole, held.part).wait(),
    "reduce_scatter": lambda group, held, _: group.reduce_scatter(held.part, held.whole).wait(),
    "all_to_all": lambda group, held, _: group.all_to_all(held.other, held.whole).wait(),
    "broadcast": lambda group, held, number: group.broadcast(held.whole, number % group.size).wait(),
    "p2p": _ping_pong,
}


class Member:
    """One actor: a member of both groups."""

    def join(self, name: str, size: int, rank: int) -> None:
        """Join raypar's group as its workers do, and a Gloo group beside it."""
        torch.set_num_threads(1)
        self._groups: dict[str, Group] = {
            "raypar": groups.join(f"{name}/raypar", "dp", size, rank, _TIMEOUT),
            "gloo": GlooGroup(
                GroupMember(f"{name}/gloo", "dp", rank, size, _TIMEOUT),
                groups.KVStore(f"{name}/gloo"),
                create_device(ray.util.get_node_ip_address()),
            ),
        }

    def measure(self, op: str, nbytes: int, rounds: int) -> dict[str, list[float]]:
        """Seconds of the operation in each group, one figure a round; the groups take turns in going first."""
        held = {name: buffers(nbytes, group) for name, group in self._groups.items()}
        found: dict[str, list[float]] = {name: [] for name in self._groups}
        for number in range(-1, rounds):  # the first round is not counted
            for name in sorted(self._groups, reverse=number % 2 == 0):
                seconds = self._sample(self._groups[name], op, held[name])
                if number >= 0:
                    found[name].append(seconds)
        return found

    def _sample(self, group: Group, op: str, held: Buffers) -> float:
        """Seconds of one operation: the mean of so many that it doesn't count how the scheduler found the members.

        What stands on one core with its peer is moved away from there some 10 ms later.
        """
        least, most = _REPEATS
        repeats = max(least, min(most, _PER_SAMPLE // held.whole.nbytes))
        for number in range(repeats * _WARM_UP // 100):
            OPS[op](group, held, number)
        group.barrier().wait()
        start = time.perf_counter()
        for number in range(repeats):
            OPS[op](group, held, number)
        seconds = (time.perf_counter() - start) / repeats
        return seconds / 2 if op == "p2p" else seconds


@dataclass(frozen=True)
class Sample:
    """An operation on ``nbytes`` among ``size`` members: seconds of each round, the slowest member's, by group."""

    op: str
    size: int
    nbytes: int
    seconds: dict[str, list[float]]


def measure_groups(sizes: Sequence[int], nbytes: Sequence[int], rounds: int) -> list[Sample]:
    """Every operation at every size, among so many actors of the Ray that this process is connected to."""
    found = []
    remote: Any = ray.remote(num_cpus=1, max_restarts=0)(Member)
    for size in sizes:
        name = f"bench-{uuid.uuid4().hex[:8]}"
        members = [remote.remote() for _ in range(size)]
        try:
            ray.get([member.join.remote(name, size, rank) for rank, member in enumerate(members)], timeout=_TIMEOUT)
            for op in OPS:
                log.info("groups: %s among %d", op, size)
                for count in nbytes:
                    measured = calmly(partial(_ask, members, op, count, rounds))
                    found.append(Sample(op, size, count, _slowest(measured.value, op)))
        finally:
            for member in members:
                ray.kill(member)
    return found


def _ask(members: Sequence[Any], op: str, nbytes: int, rounds: int) -> list[dict[str, list[float]]]:
    """What each member measures."""
    found: list[dict[str, list[float]]] = ray.get(
        [member.measure.remote(op, nbytes, rounds) for member in members], timeout=_TIMEOUT
    )
    return found


def _slowest(members: Sequence[dict[str, list[float]]], op: str) -> dict[str, list[float]]:
    """Of each round the slowest member; of p2p the two that talk."""
    timed = members[:2] if op == "p2p" else members
    return {name: [max(each) for each in zip(*(member[name] for member in timed), strict=True)] for name in timed[0]}
