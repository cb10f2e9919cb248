"""Solving for the costs of blocks, actions and updates that short runs have besides counted products and messages."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, get_args

from raypar.actors.machine.host_cores import num_cores
from raypar.actors.specs.model import Transformer
from raypar.actors.specs.run import Run
from raypar.calibration.probes import FEW, MANY, Measured
from raypar.config.run import check_run
from raypar.planner.calibrated.calibrated_costs import (
    calibrated_costs,
    head_products,
    num_logits,
    stage_seconds,
    step_seconds,
)
from raypar.planner.calibrated.calibration import (
    OF_PARAMETERS,
    Beside,
    Calibration,
    Family,
    Kind,
    MeasuredUpdate,
    relative_fit,
)
from raypar.planner.memory.worker import worker_memory
from raypar.planner.prediction import from_flops
from raypar.planner.sizes.sized_run import SizedRun
from raypar.schedules.action import Op
from raypar.schedules.float_sum import float_sum


class Passes(NamedTuple):
    """Seconds of a forward and of a backward."""

    forward: float
    backward: float


def solved(known: Calibration, found: Mapping[str, Sequence[Measured]], actors: int) -> Calibration:
    """Return a calibration with the costs solved from the short runs.

    Args:
        known: A calibration with the measured products, attention and groups.
        found: The measurements of the runs, by name; see ``probe_runs``.
        actors: Number of actors that can compute at once without sharing a core.
    """
    gpt, pipelines = found["gpt"], found.get("pipeline", ())
    known = _with(known, _of_heads(known, pipelines))
    known = replace(
        _with_actions(known, gpt[0], gpt[1]),
        update=_update(gpt),
        busy=_busy(found["reduced"], gpt[2:], actors) if "reduced" in found else 1.0,
        message=pipelines[-2].message if pipelines else 0.0,
        call=max(0.0, statistics.median(one.between for one in gpt)),
        process=_process(found["first"][0]) if known.device == "cpu" else known.process,
    )
    known = _with(known, _of_kind(known, "gpt", gpt[1:]))
    if "reduced" in found:
        known = _with(known, _of_replicas(known, found["reduced"], gpt[2:]))
    if "split" in found:
        known = _with(known, _of_split(known, gpt[2:], found["split"]))
    for kind in ("tensor", "lent", "gathered", "context", "sequence", "experts", "expert parallel", "llama"):
        known = _with(known, _of_kind(known, kind, found.get(kind, ())))
    return _with(known, _of_pipelines(known, pipelines))


def _with(known: Calibration, besides: Iterable[Beside]) -> Calibration:
    return replace(known, besides=(*known.besides, *besides))


def without_unmeasured(known: Calibration) -> tuple[Calibration, list[Kind]]:
    """Return a calibration without the kinds that took no longer than their counted products, and these kinds.

    Their other costs are lost in the noise of the short runs: they are unknown, which is not 0.

    Args:
        known: The calibration, from ``solved``.
    """
    kinds = list(dict.fromkeys(one.kind for one in known.besides))
    measured = {one.kind for one in known.besides if one.forward or one.backward}
    left = tuple(one for one in known.besides if one.kind in measured)
    return replace(known, besides=left), [kind for kind in kinds if kind not in measured]


def _busy(together: Sequence[Measured], alone: Sequence[Measured], actors: int) -> float:
    """Return the factor by which runs take longer while all cores compute; at most the number of actors."""
    both = [float_sum(one.forward + one.backward for one in each) for each in (together, alone)]
    return min(max(1.0, both[0] / both[1]), float(actors))


def _of_heads(known: Calibration, found: Sequence[Measured]) -> Iterator[Beside]:
    """Yield the costs of the head and the loss besides the head's product.

    They are the seconds by which actions of the last stage of pipelines exceed those of the first.
    """
    for one in found:
        model = _model_of(one.run)
        product = head_products(one.run, model, known)
        longer = one.last_forward - product.forward, one.last_backward - product.backward
        yield Beside("head", round(num_logits(one.run, model)), *(max(0.0, seconds) for seconds in longer))


def _with_actions(known: Calibration, few: Measured, many: Measured) -> Calibration:
    """Return a calibration with the fixed cost of an action, from runs of FEW and of MANY small blocks."""
    one, more = _uncounted(known, few), _uncounted(known, many)
    forward, backward = (
        max(0.0, less - FEW * max(0.0, longer - less) / (MANY - FEW)) for less, longer in zip(one, more, strict=True)
    )
    return replace(known, action_forward=forward, action_backward=backward)


def _of_kind(known: Calibration, kind: Kind, found: Sequence[Measured]) -> Iterator[Beside]:
    """Yield the costs of the blocks of runs that a calibration does not predict yet."""
    before = known
    if kind in get_args(Family):  # for an unmeasured family it would predict the costs of another one
        before = replace(known, besides=tuple(one for one in known.besides if one.kind not in get_args(Family)))
    for one in found:
        model = _model_of(one.run)
        left = _uncounted(before, one, slower=known.busy if one.run.mesh.size > 1 else 1.0)
        forward, backward = (max(0.0, seconds / model.layers) for seconds in left)
        yield Beside(kind, _size(one.run, kind, model), forward, backward)


def _of_replicas(known: Calibration, together: Sequence[Measured], alone: Sequence[Measured]) -> Iterator[Beside]:
    """Yield the costs of a step due to replicas that sum gradients and shard the update."""
    for replicas, one in zip(together, alone, strict=True):
        run, model = replicas.run, _model_of(replicas.run)
        sized = _sized(run)
        yield Beside("reduced", _size(run, "reduced", model), 0.0, max(0.0, replicas.ends - one.ends) / model.layers)
        yield Beside("shared", max(sized.counts.held), 0.0, max(0.0, replicas.step - step_seconds(sized, known)))


def _sized(run: Run) -> SizedRun:
    return SizedRun.of(run, check_run(run)["train"])


def _of_split(known: Calibration, wholes: Sequence[Measured], halves: Sequence[Measured]) -> Iterator[Beside]:
    """Yield the costs of split backwards beyond whole ones, and of W beyond its products."""
    for whole, half in zip(wholes, halves, strict=True):
        run, model = half.run, _model_of(half.run)
        counted = stage_seconds(_sized(run), 0, range(model.layers), known)
        longer = half.forward + half.backward - whole.forward - whole.backward
        found = longer, half.later - counted[Op.W]
        both, weight_half = (max(0.0, seconds / model.layers) for seconds in found)
        yield Beside("split", _size(run, "split", model), both, weight_half)


def _model_of(run: Run) -> Transformer:
    assert isinstance(run.model, Transformer)
    return run.model


def _size(run: Run, kind: Kind, model: Transformer) -> int:
    """Return the size of a block of a kind: see ``Beside``."""
    if kind in OF_PARAMETERS:
        return _sized(run).counts.units[0].gathered // model.layers
    return run.micro_batch_size * model.seq // run.mesh.cp * model.hidden


def _uncounted(known: Calibration, one: Measured, slower: float = 1.0) -> Passes:
    """Return the seconds of a forward and a backward of a run of one stage that a calibration does not predict.

    Args:
        known: The calibration.
        one: The measurements.
        slower: The factor by which its actors were slower because others computed at once.
    """
    run, model = one.run, _model_of(one.run)
    counted = stage_seconds(_sized(run), 0, range(model.layers), known)
    return Passes(one.forward / slower - counted[Op.F], one.backward / slower - counted[Op.B])


def _of_pipelines(known: Calibration, found: Sequence[Measured]) -> Iterator[Beside]:
    """Yield the costs of blocks in stages that a calibration does not predict yet."""
    for one in found:
        run, model = one.run, _model_of(one.run)
        alone, beside_others = _stage(run, known, None), _stage(run, known, num_cores())
        blocks = model.layers / run.mesh.pp
        longer = (
            max(0.0, (taken / together - 1) * lonely / blocks)
            for taken, together, lonely in zip((one.forward, one.backward), beside_others, alone, strict=True)
        )
        yield Beside("pipeline", _size(run, "pipeline", model), *longer)


def _stage(run: Run, known: Calibration, cores: int | None) -> Passes:
    """Return the mean seconds that a calibration predicts for a pipeline's stages, on actors that may share cores."""
    sized = _sized(run)
    costs = calibrated_costs(sized, known, cores)
    actions = [action for row in sized.schedule.rows for action in row]
    forward, backward = (statistics.fmean(costs.of(one) for one in actions if one.op is op) for op in (Op.F, Op.B))
    return Passes(forward, backward)


def _process(found: Measured) -> int:
    """Return the bytes of an actor's process without the memory of its run."""
    sized = _sized(found.run)
    memory = worker_memory(sized, from_flops(sized).timeline)[0]
    return max(1, round(found.peak) - (memory.peak - memory.process))


def _update(found: Sequence[Measured]) -> MeasuredUpdate:
    """Fit the seconds of an update by tensor and by parameter."""
    counts = [_sized(one.run).counts for one in found]
    terms = [(1.0, float(sum(len(units.sizes) for units in one.units)), float(max(one.held))) for one in counts]
    step, tensor, parameter = relative_fit(terms, [one.step for one in found])
    return MeasuredUpdate(max(0.0, step), max(0.0, tensor), max(0.0, parameter))
