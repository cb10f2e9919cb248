"""The automatic zero-bubble schedule: a search for the shortest step with measured costs, under a memory bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import isfinite

from raypar.schedules.action import Action, Op
from raypar.schedules.float_sum import float_sum
from raypar.schedules.generators.critical_path import Timed, action_ends, postpone_weight_gradients
from raypar.schedules.generators.dual_pipe import dualpipe_v
from raypar.schedules.generators.entry import Sizes
from raypar.schedules.generators.interleaved import interleaved, zb_interleaved
from raypar.schedules.generators.list_scheduling import Cost, ListScheduling, Policy, RankMemory, Rows
from raypar.schedules.generators.one_f_one_b import one_f_one_b
from raypar.schedules.generators.v_shape import v_half, v_min, zb_v
from raypar.schedules.generators.zero_bubble import zb_h1, zb_h2
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.simulation.simulate import Costs

SIZES = Sizes(max_chunks=2, hint="set chunks to 1, or to 2 for a V")

_BUDGET = 250_000  # actions that each half of a search may time: about half a second
_ROUNDING = 1e-9  # of a length
_EXTRAS, _FITS, _TAILS = (1, 2, 0, 3), (0.0, 0.25, 0.5, 1.0), (0.25, 0.5, 1.0)  # of the policies
_SLOPES, _SLOPES_OF_CHUNKS = (2.0, 1.5, 1.0), (0.5, 0.75, 1.0)


def zb_1p(num_ranks: int, num_microbatches: int, num_chunks: int = 1, *, costs: Costs | None = None) -> Schedule:
    """Search for the shortest step of the given costs in the memory of 1F1B: p microbatches a rank.

    It is never longer than ``zb-h1`` and ``1f1b``, and with two stages a rank, in a V, never longer than ``zb-v``.
    See ``automatic`` for other bounds.

    Args:
        num_ranks: Number of pipeline ranks p.
        num_microbatches: Number of microbatches m in a step.
        num_chunks: Number of stages on each rank, 1 or 2.
        costs: Durations of F, I, W and the link. A run passes those predicted from its FLOPs and bytes. None: those of
            ``simulate``.

    Returns:
        The schedule, of compute actions only.

    Raises:
        ScheduleError: If a size is not accepted.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 3.1, where it is called ZB-1p.

    With 4 ranks, 8 microbatches::

        rank 0  F0 F1 F2 F3          I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
        rank 1     F0 F1 F2       I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
        rank 2        F0 F1    I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
        rank 3           F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7
        zb-1p in slots: makespan 27, bubble 11.1%, in flight 4 4 4 4
    """
    return _zero_bubble("zb-1p", num_ranks, num_microbatches, num_chunks, num_ranks, costs)


def zb_2p(num_ranks: int, num_microbatches: int, num_chunks: int = 1, *, costs: Costs | None = None) -> Schedule:
    """Search for the shortest step of the given costs in twice the memory of 1F1B: 2p microbatches a rank.

    It is never longer than ``zb-h2``, ``zb-h1`` and ``1f1b``, and with two stages a rank, in a V, never longer than
    ``zb-v`` and ``dualpipe-v``. See ``automatic`` for other bounds.

    Args:
        num_ranks: Number of pipeline ranks p.
        num_microbatches: Number of microbatches m in a step.
        num_chunks: Number of stages on each rank, 1 or 2.
        costs: Durations of F, I, W and the link. A run passes those predicted from its FLOPs and bytes. None: those of
            ``simulate``.

    Returns:
        The schedule, of compute actions only.

    Raises:
        ScheduleError: If a size is not accepted.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 3.1, where it is called ZB-2p.

    With 4 ranks, 8 microbatches::

        rank 0  F0 F1 F2 F3          I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
        rank 1     F0 F1 F2       I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
        rank 2        F0 F1    I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
        rank 3           F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7
        zb-2p in slots: makespan 27, bubble 11.1%, in flight 4 4 4 4
    """
    return _zero_bubble("zb-2p", num_ranks, num_microbatches, num_chunks, 2 * num_ranks, costs)


def _zero_bubble(name: str, ranks: int, microbatches: int, chunks: int, most: int, costs: Costs | None) -> Schedule:
    """Search for the shortest step with one stage a rank, or with two in a V."""
    SIZES.demand(name, ranks, microbatches, chunks)
    placement = (*range(ranks), *reversed(range(ranks)))[: ranks * chunks]
    return automatic(ranks, microbatches, costs or Costs(), most, placement=placement, name=name)


def automatic(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs,
    most: float,
    *,
    placement: Sequence[int] | None = None,
    kept: float = 1.0,
    flush: bool = True,
    name: str = "automatic",
) -> Schedule:
    """Search for the shortest schedule of a placement of stages, under a memory bound.

    List scheduling generates one schedule for each policy of a grid. The candidates are these and the published
    schedules of that placement that the bound allows. The shortest one is shortened further by moving W off its
    critical path. The same arguments give the same schedule.

    Args:
        num_ranks: Number of pipeline ranks p.
        num_microbatches: Number of microbatches m in a step.
        costs: Durations of F, I, W, a whole B and the link, by stage and action where known; such as
            ``costs_of(*job.timelines())`` of a run whose backwards are split.
        most: Most activations that a rank may hold, in microbatches that pass all of its stages; 1 or more.
        placement: The rank of each stage; ranks may have different numbers of stages. None for one stage a rank, in
            order. ``(0, 1, 1, 0)`` is a V.
        kept: The part of a microbatch's activations that a rank holds between I and W.
        flush: Whether all ranks end a step together, because the optimizer synchronizes them: the length of a step is
            the time from the first start to the last end. If not, it is the longest span of a rank.
        name: The name of the schedule.

    Returns:
        The schedule, of compute actions only.

    Raises:
        ScheduleError: If a size, the placement or the bound is not accepted, or if a cost is not known.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 3.1.
    """
    SIZES.demand(name, num_ranks, num_microbatches)
    ranks = tuple(range(num_ranks)) if placement is None else tuple(placement)
    _demand(name, num_ranks, ranks, costs, most, kept)
    cost, memory = _table(len(ranks), num_microbatches, costs).__getitem__, RankMemory.of(most, kept, ranks)
    least = _least(ranks, num_microbatches, cost, costs.link, flush=flush)
    best: Timed | None = None
    left = _BUDGET
    for rows in _candidates(ranks, num_microbatches, cost, costs.link, memory):
        found = action_ends(rows, ranks, cost, costs.link)
        if best is None or found.length(flush=flush) < best.length(flush=flush) * (1 - _ROUNDING):
            best = found
        left -= 2 * sum(map(len, rows))
        if left < 0 or best.length(flush=flush) <= least * (1 + _ROUNDING):
            break
    assert best is not None
    found = postpone_weight_gradients(best, cost, costs.link, memory, flush=flush, budget=_BUDGET)
    return Schedule.of(name, found.rows)


def _least(placement: Sequence[int], num_microbatches: int, cost: Cost, link: float, *, flush: bool) -> float:
    """Return a lower bound of the length of a schedule.

    A rank starts when the first microbatch has arrived, and then performs all its actions. And with one stage a rank,
    when a rank has performed its F and I, the last gradient has to travel back to all ranks before it, each of which
    then performs the W.
    """
    bound = time = 0.0
    starts: dict[int, float] = {}
    work = dict.fromkeys(placement, 0.0)
    last = num_microbatches - 1
    for stage, rank in enumerate(placement):
        starts.setdefault(rank, time)
        halves = [float_sum(cost(Action(stage, op, at)) for at in range(num_microbatches)) for op in (Op.F, Op.I, Op.W)]
        work[rank] += float_sum(halves)
        bound = max(bound, work[rank] + starts[rank] * flush)
        done = starts[rank] + halves[0] + halves[1]
        for other in range(stage, -1, -1) if len(work) == len(placement) else ():
            done += (cost(Action(other, Op.I, last)) + link) * (other < stage)
            bound = max(bound, done + cost(Action(other, Op.W, last)) - starts[placement[other]] * (not flush))
        crosses = stage + 1 < len(placement) and placement[stage + 1] != rank
        time += cost(Action(stage, Op.F, 0)) + link * crosses
    return bound


def _candidates(
    placement: Sequence[int], num_microbatches: int, cost: Cost, link: float, memory: RankMemory
) -> Iterator[Rows]:
    """Yield the rows of the published schedules that the bound allows, then those of all policies."""
    for rows in _published(placement, num_microbatches):
        if all(map(memory.allows, rows)):
            yield rows
    slopes = _SLOPES if len(set(placement)) == len(placement) else _SLOPES_OF_CHUNKS
    for extra, slope, fits, tail in product(_EXTRAS, slopes, _FITS, _TAILS):
        policy = Policy(fits, tail, slope, extra)
        yield ListScheduling(placement, num_microbatches, cost, link, memory, policy).rows()


def _published(placement: Sequence[int], num_microbatches: int) -> Iterator[Rows]:
    """Yield the rows of the schedules of the catalog that have this placement and hold less than all microbatches."""
    num_ranks = len(set(placement))
    chunks = len(placement) // num_ranks
    found = [generate(num_ranks, num_microbatches) for generate in (one_f_one_b, zb_h1, zb_h2)]
    if chunks == 2:
        found += [generate(num_ranks, num_microbatches) for generate in (zb_v, v_half, v_min, dualpipe_v)]
    if chunks >= 2:
        found += [generate(num_ranks, num_microbatches, chunks) for generate in (interleaved, zb_interleaved)]
    yield from ([list(row) for row in schedule.rows] for schedule in found if schedule.placement == placement)


def _table(num_stages: int, num_microbatches: int, costs: Costs) -> dict[Action, float]:
    every = product(range(num_stages), (Op.F, Op.B, Op.I, Op.W), range(num_microbatches))
    return {action: costs.of(action) for action in (Action(*one) for one in every)}


def _demand(name: str, num_ranks: int, placement: tuple[int, ...], costs: Costs, most: float, kept: float) -> None:
    """Raise ScheduleError if the search can't use its arguments, with all faults."""
    faults = []
    if set(placement) != set(range(num_ranks)):
        faults.append(f"placement={placement}: name each of the ranks 0 to {num_ranks - 1} once or more, and no other")
    if most < 1:
        faults.append(f"most={most}: a rank holds one microbatch at least, set most to 1 or more")
    if not 0 <= kept <= 1:
        faults.append(f"kept={kept}: it is a part of a microbatch's activations, set it from 0 to 1")
    unknown = [op.value for op in (Op.F, Op.I) if costs.of(Action(0, op, 0)) <= 0]
    endless = [op.value for op in (Op.F, Op.I, Op.B, Op.W) if not isfinite(costs.of(Action(0, op, 0)))]
    if endless:
        faults.append(f"costs say that {' and '.join(endless)} of stage 0 last for no finite time: correct the costs")
    if unknown:
        which = " and ".join(unknown)
        faults.append(f"costs say that {which} of stage 0 take no time: measure a schedule with split backwards")
    if faults:
        raise ScheduleError(f"schedule {name!r} cannot be made: " + "; ".join(faults))
