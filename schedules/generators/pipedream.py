"""Asynchronous schedules of the PipeDream family: 1F1B without a flush, in which every stage updates by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raypar.schedules.action import Action, Op
from raypar.schedules.generators.entry import Sizes
from raypar.schedules.generators.one_f_one_b import one_f_one_b
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.versions import versions_used

_HINT = "an asynchronous schedule has one stage a rank, leave chunks out"
SIZES = Sizes(hint=_HINT)
SIZES_2BW = Sizes(one_a_rank=True, hint=_HINT)

Version = Callable[[int, int], int]  # from a microbatch and the newest version to the version of its forward


def pipedream(num_ranks: int, num_microbatches: int, num_steps: int) -> Schedule:
    """Run 1F1B over all steps. Every stage updates after its last backward of a step, and uses its newest weights.

    Stage s of p computes the backward of a microbatch with the weights of its forward, and so keeps p - s versions
    (with one microbatch a step). Its gradient of step t is computed with the weights of step t - (p - 1 - s).

    Args:
        num_ranks: Number of pipeline ranks p.
        num_microbatches: Number of microbatches of a step.
        num_steps: Number of steps from one flush of the pipeline to the next.

    Returns:
        The schedule, without communication.

    Raises:
        ScheduleError: A size is not accepted.

    Source: Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", section 3.3 (weight
    stashing).

    With 3 ranks, 1 microbatch, 7 steps::

        rank 0  F0.0 F1.0 F2.0           B0   F3.1 B1   F4.2 B2   F5.3 B3   F6.4 B4        B5        B6
        rank 1       F0.0 F1.0      B0   F2.1 B1   F3.2 B2   F4.3 B3   F5.4 B4   F6.5 B5        B6
        rank 2            F0.0 B0   F1.1 B1   F2.2 B2   F3.3 B3   F4.4 B4   F5.5 B5   F6.6 B6
        pipedream in slots: makespan 18, bubble 22.2%, in flight 3 2 1, versions 3 2 1
    """
    return _stream("pipedream", num_ranks, num_microbatches, num_steps, lambda microbatch, newest: newest)


def pipedream_vertical(num_ranks: int, num_microbatches: int, num_steps: int) -> Schedule:
    """Run as ``pipedream``, but let all stages compute a microbatch with the version that stage 0 has for it.

    So the gradient of step t is computed with the weights of step t - (p - 1), and every stage keeps up to p versions.

    Args, return value and errors are those of ``pipedream``.

    Source: Narayanan et al. 2019, section 3.3 (vertical sync).

    With 3 ranks, 1 microbatch, 7 steps::

        rank 0  F0.0 F1.0 F2.0           B0   F3.1 B1   F4.2 B2   F5.3 B3   F6.4 B4        B5        B6
        rank 1       F0.0 F1.0      B0   F2.0 B1   F3.1 B2   F4.2 B3   F5.3 B4   F6.4 B5        B6
        rank 2            F0.0 B0   F1.0 B1   F2.0 B2   F3.1 B3   F4.2 B4   F5.3 B5   F6.4 B6
        pipedream-vertical in slots: makespan 18, bubble 22.2%, in flight 3 2 1, versions 3 3 3
    """
    first = versions_used(pipedream(num_ranks, num_microbatches, num_steps).rows[0], 0)
    return _stream(
        "pipedream-vertical",
        num_ranks,
        num_microbatches,
        num_steps,
        lambda microbatch, newest: first[microbatch],
    )


def pipedream_2bw(num_ranks: int, num_microbatches: int, num_steps: int) -> Schedule:
    """Run as ``pipedream`` with two versions on every stage: step t computes with the weights before step t - 1.

    Args, return value and errors are those of ``pipedream``. A step has at least as many microbatches as there are
    ranks, so that the version exists in time.

    Source: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 3.1 (double-buffered
    weight updates).

    With 2 ranks, 2 microbatches, 4 steps::

        rank 0  F0.0 F1.0      B0   F2.0 B1   F3.0 B2   F4.1 B3   F5.1 B4   F6.2 B5   F7.2 B6        B7
        rank 1       F0.0 B0   F1.0 B1   F2.0 B2   F3.0 B3   F4.1 B4   F5.1 B5   F6.2 B6   F7.2 B7
        pipedream-2bw in slots: makespan 18, bubble 11.1%, in flight 2 1, versions 2 2
    """
    return _stream(
        "pipedream-2bw",
        num_ranks,
        num_microbatches,
        num_steps,
        lambda microbatch, newest: max(0, microbatch // num_microbatches - 1),
        SIZES_2BW,
    )


def _stream(
    name: str, num_ranks: int, num_microbatches: int, num_steps: int, version: Version, sizes: Sizes = SIZES
) -> Schedule:
    """Add the updates, and the uses of versions, to 1F1B over all microbatches of all steps."""
    sizes.demand(name, num_ranks, num_microbatches)
    if num_steps < 1:
        raise ScheduleError(f"schedule {name!r} cannot be made: steps={num_steps}: set the steps to 1 or more")
    rows = one_f_one_b(num_ranks, num_microbatches * num_steps).rows
    return Schedule.of(name, [tuple(_updating(row, num_microbatches, version)) for row in rows])


def _updating(row: tuple[Action, ...], num_microbatches: int, version: Version) -> Iterator[Action]:
    """Yield a row with each step's update after its last backward, and USE before a forward of another version."""
    newest = current = 0
    for action in row:
        stage, op, microbatch, _ = action
        assert microbatch is not None
        if op is Op.F and (wanted := version(microbatch, newest)) != current:
            current = wanted
            yield Action(stage, Op.USE, current)
        yield action
        if op is Op.B and (microbatch + 1) % num_microbatches == 0:
            yield Action(stage, Op.STEP, newest)
            newest += 1
