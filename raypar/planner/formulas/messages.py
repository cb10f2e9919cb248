"""How many bytes each member of a group sends."""

from __future__ import annotations

from typing import Literal

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]


def collective_bytes(op: Collective, nbytes: float, members: int) -> float:
    """Return the bytes that a member sends in an operation whose whole tensor has so many, round a ring.

    Args:
        op: The operation. With N members: all_reduce 2 (N - 1) / N of the tensor, reduce_scatter, all_gather and
            all_to_all (N - 1) / N, broadcast all of it from one member to the next.
        nbytes: Bytes of the whole tensor; of all_to_all, of what a member has.
        members: Number of members N.

    Source: Patarasuk & Yuan 2009, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations".

    Examples:
        >>> collective_bytes("all_reduce", 1000, 4)
        1500.0
    """
    part = (members - 1) / members
    parts = {"all_reduce": 2 * part, "broadcast": float(members > 1)}
    return nbytes * parts.get(op, part)


def zero_bytes(level: Literal[0, 1, 2, 3], parameter_bytes: float, replicas: int) -> float:
    """Return the bytes that a replica sends in a step of one microbatch: 2, 2, 2 or 3 times the parameters'.

    Gradients are reduced (level 0: all_reduce; else reduce_scatter), and weights gathered: after the update, or with
    level 3 ahead of the forward and again ahead of the backward.

    Args:
        level: The level of ZeRO.
        parameter_bytes: Bytes of all parameters, which gradients have too.
        replicas: Number of replicas.

    Source: Rajbhandari et al. 2020, "ZeRO", section 7.

    Examples:
        >>> [zero_bytes(level, 64.0, 2) for level in (0, 1, 2, 3)]
        [64.0, 64.0, 64.0, 96.0]
    """
    if level == 0:
        return collective_bytes("all_reduce", parameter_bytes, replicas)
    gathers = 2 if level == 3 else 1
    gathered = collective_bytes("all_gather", parameter_bytes, replicas)
    return collective_bytes("reduce_scatter", parameter_bytes, replicas) + gathers * gathered


def tensor_parallel_bytes(layers: int, hidden: int, seq: int, samples: int, members: int, element: int = 2) -> float:
    """Return the bytes that a tensor rank sends in all layers' forward and backward of a microbatch.

    A layer has two all_reduces of b s h elements in its forward and two in its backward. With sequence parallelism each
    is a reduce_scatter and an all_gather, which move as much.

    Args:
        layers: Number of layers of the stage.
        hidden: Width h.
        seq: Tokens of a sequence s.
        samples: Sequences of a microbatch b.
        members: Number of tensor ranks.
        element: Bytes of an element.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3; Korthikanti et al. 2022, section 4.2.2.

    Examples:
        >>> tensor_parallel_bytes(1, 8, 4, 1, 2, 4)
        512.0
    """
    return layers * 4 * collective_bytes("all_reduce", samples * seq * hidden * element, members)
