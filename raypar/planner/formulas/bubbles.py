"""Closed forms of a pipeline's bubble: the share of a step in which a rank computes nothing.

They are of equal stages and messages that take no time. ``raypar draw`` simulates any schedule with any costs.
"""

from __future__ import annotations

from typing import Literal

PipelineForm = Literal["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"]


def bubble(
    form: PipelineForm,
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    *,
    f: float = 1.0,
    i: float = 1.0,
    w: float = 1.0,
) -> float:
    """Return the bubble of a step as a share of it.

    Args:
        form: The schedule. Per rank and step the idle time is: ``gpipe`` and ``1f1b`` (p - 1)(F + I + W);
            ``interleaved`` that divided by the chunks v; ``zb-h1`` (p - 1)(F + I - W); ``zb-h2`` (p - 1)(F + I - 2 W),
            measured from a rank's first action to its last; ``naive`` has one microbatch under way at a time.
        ranks: Number of pipeline ranks p.
        microbatches: Number of microbatches m; of ``interleaved`` and ``zb-h1`` at least p, of ``zb-h2`` 2 p - 1.
        chunks: Stages v of a rank.
        f: Time of a forward of all chunks of a rank, in any unit.
        i: Time of the gradients of its inputs.
        w: Time of the gradients of its weights.

    Source: Huang et al. 2019, "GPipe", section 2.3; Narayanan et al. 2021, sections 2.2.1 and 2.2.2; Qi et al. 2023,
    "Zero Bubble Pipeline Parallelism", table 2.

    Examples:
        >>> bubble("1f1b", 4, 8), bubble("interleaved", 4, 8, 2)
        (0.2727272727272727, 0.15789473684210525)
    """
    busy = microbatches * (f + i + w)
    idle = {
        "naive": (ranks - 1) * busy,
        "gpipe": (ranks - 1) * (f + i + w),
        "1f1b": (ranks - 1) * (f + i + w),
        "interleaved": (ranks - 1) * (f + i + w) / chunks,
        "zb-h1": (ranks - 1) * max(f + i - w, 0.0),
        "zb-h2": (ranks - 1) * max(f + i - 2 * w, 0.0),
    }[form]
    return idle / (busy + idle)


def dualpipe_bubble(ranks: int, *, both: float, b: float, w: float) -> float:
    """Return the idle time of a rank in DualPipe, (p/2 - 1)(F&B + B - 3 W).

    Args:
        ranks: Number of pipeline ranks p, even.
        both: Time of a forward and a backward that overlap.
        b: Time of a whole backward.
        w: Time of the gradients of weights.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", table 2.

    Examples:
        >>> dualpipe_bubble(8, both=3.0, b=2.0, w=1.0)
        6.0
    """
    return (ranks / 2 - 1) * (both + b - 3 * w)


def zero_bubble_memory(form: Literal["zb-v", "v-half", "v-min"]) -> float:
    """Return the most activations that a rank keeps, as a part of what 1F1B's first rank keeps, for many ranks.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3.2.

    Examples:
        >>> zero_bubble_memory("v-half")
        0.5
    """
    return {"zb-v": 1.0, "v-half": 1 / 2, "v-min": 1 / 3}[form]
