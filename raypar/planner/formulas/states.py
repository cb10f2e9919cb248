"""How many bytes weights, gradients and an optimizer's states take for each parameter."""

from __future__ import annotations

import math
from typing import Literal


def bytes_per_parameter(
    level: Literal[0, 1, 2, 3] = 0, replicas: int = 1, *, half: bool = True, fp32_gradients: bool = False
) -> float:
    """Return the bytes that a replica holds for each parameter with Adam.

    In half precision weights and gradients have 2 bytes each, and the fp32 weights and two means 12: 16 in all. With
    gradients that are summed in fp32 they are 18, and in fp32 alone 4 + 4 + 8.

    Args:
        level: The level of ZeRO: replicas share out nothing, the optimizer's states, gradients too, or weights too.
        replicas: Number N of replicas that share.
        half: Whether layers compute in bf16 or fp16.
        fp32_gradients: Whether gradients are summed in fp32.

    Source: Rajbhandari et al. 2020, "ZeRO", section 3.1 and figure 1.

    Examples:
        >>> [bytes_per_parameter(level, 64) for level in (0, 1, 2, 3)]
        [16.0, 4.1875, 2.21875, 0.25]
        >>> 100e9 * bytes_per_parameter() / 1e9
        1600.0
    """
    weights, gradients, states = (2, 4 if fp32_gradients else 2, 12) if half else (4, 4, 8)
    of_states, of_gradients, of_weights = (replicas if level > kind else 1 for kind in range(3))
    return states / of_states + gradients / of_gradients + weights / of_weights


def gpus_for(static_bytes: float, activation_bytes: float, memory: float) -> int:
    """Return how many devices hold all that training keeps, if nothing is held twice.

    Args:
        static_bytes: Bytes of weights, gradients and states.
        activation_bytes: Bytes of activations.
        memory: Bytes that a device has for them.

    Examples:
        >>> gpus_for(1600e9, 4800e9, 80e9)
        80
    """
    return math.ceil((static_bytes + activation_bytes) / memory)
