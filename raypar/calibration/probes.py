"""Short runs of small models, of which it is measured what blocks, actions and updates take besides their products."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.model import GPT, Llama, Transformer
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind
from raypar.config.run import check_run, world_of
from raypar.job.job import Job
from raypar.job.launch import launch
from raypar.planner.calibrated_costs import stage_seconds
from raypar.planner.calibration import Beside, Calibration, Crowd, Kind, Update
from raypar.planner.memory import worker_memory
from raypar.planner.parameters import num_parameters
from raypar.planner.prediction import from_calibration, from_flops
from raypar.reporting.needs import counts_of
from raypar.reporting.report import Report
from raypar.schedules.action import RECVS, SENDS, Op
from raypar.schedules.timeline import Timeline

_STEPS = 7  # of each run; the first one also warms up
_HALVINGS = 12  # in which a duration is found that predicts a step
_FEW, _MANY = 1, 5  # blocks of the two smallest models, whose difference is that of blocks alone
_SMALL, _MIDDLE, _LARGE = (32, 32, 1), (96, 128, 2), (256, 256, 2)  # hidden, tokens, samples
_HEADS = 4
_CALLED: Mapping[Kind, str] = {"lent": "gradients in buckets", "gathered": "weights that are gathered"}
_FOUR = GPT(layers=4, hidden=_MIDDLE[0], heads=_HEADS, seq=_MIDDLE[1])
_FAMILIES: Mapping[str, type[GPT] | type[Llama]] = {"gpt": GPT, "llama": Llama}
_EXPERTS = MoE(experts=4, top_k=2)
# What each kind is measured on, besides what the ones before it are.
_WITH: Mapping[Kind, Mapping[str, Any]] = {
    "tensor": {"mesh": Mesh(tp=2)},
    "lent": {"mesh": Mesh(dp=2), "zero": 2},
    "gathered": {"mesh": Mesh(dp=2), "zero": 3},
    "context": {"mesh": Mesh(cp=2)},
    "sequence": {"mesh": Mesh(tp=2), "sequence_parallel": True},
    "experts": {"moe": _EXPERTS},
    "expert parallel": {"moe": _EXPERTS, "mesh": Mesh(dp=2, ep=2)},
}
# Of actors that share cores, runs with operations inside of layers, and with messages between stages.
_CROWDS: tuple[Mapping[str, Any], ...] = ({"mesh": Mesh(dp=2, tp=2)}, {"mesh": Mesh(pp=4), "model": _FOUR})


@dataclass(frozen=True)
class Measured:
    """What a run of a few steps has taken.

    Attributes:
        run: The run.
        forward: Seconds of a forward.
        backward: Seconds of a backward, of both halves if it is split.
        later: Seconds of its W; 0 if it is whole.
        step: Seconds of the STEP.
        message: Median seconds of a SEND, and of a RECV whose message was there; 0 without messages.
        span: Seconds from the first action of a step to its last.
        between: Seconds of a step that are in no action.
        peak: Bytes of the largest process.
    """

    run: Run
    forward: float
    backward: float
    later: float
    step: float
    message: float
    span: float
    between: float
    peak: int


class Passes(NamedTuple):
    """Seconds of a forward and of a backward."""

    forward: float
    backward: float


def probed(
    device: DeviceKind,
    actors: int,
    crowd: int,
    known: Calibration,
    say: Callable[[str], object],
    late: Callable[[], bool],
) -> Calibration:
    """Take the short runs.

    Args:
        device: Device of the actors.
        actors: As many as compute at once without sharing a core, at least 2.
        crowd: Number of actors that do share cores; 0 if none would.
        known: A calibration with the measured products, attention and groups.
        say: Told what is measured.
        late: Whether it is time to leave out what has not been measured yet.

    Returns:
        The calibration with what the runs have told.
    """
    middle, large = (_run("gpt", size, device) for size in (_MIDDLE, _LARGE))
    most = max(actors, crowd)
    say(f"launching {most} actors for short runs")
    with launch(replace(middle, mesh=Mesh(dp=most))) as job:
        first = _taken(job, job.run)  # on new actors: what a process has taken once stays
        busy = _reset(job, replace(large, mesh=Mesh(dp=actors)))
        message = _reset(job, replace(large, mesh=Mesh(pp=2))).message
        crowds = [_reset(job, replace(middle, **changed)) for changed in _CROWDS] if crowd else []
        say("blocks of a gpt")
        found = [_reset(job, run) for run in _family("gpt", device)]
        alone = found[-1]
        ratio = (busy.forward + busy.backward) / (alone.forward + alone.backward)
        known = replace(
            _with_actions(known, found),
            update=_update(found),
            crowd=Crowd(max(0.0, first.step - found[-2].step) if crowd else 0.0),
            busy=min(max(1.0, ratio), float(actors)),  # at worst on one core
            message=message,
            call=max(0.0, statistics.median(one.between for one in found)),
            process=_process(first) if device == "cpu" else known.process,
        )
        known = _with_kind(known, "gpt", found[1:])
        say("backwards in halves")
        known = _with_split(known, found[-2:], [_reset(job, replace(one.run, backward="split")) for one in found[-2:]])
        for kind, changed in _WITH.items():
            if late():
                say(f"{kind}: left out, for lack of time")
                continue
            say(f"blocks with {_CALLED.get(kind, kind)}")
            known = _with_kind(known, kind, [_reset(job, _changed(run, changed)) for run in (middle, large)])
        if late():
            say("blocks of a llama: left out, for lack of time")
        else:
            say("blocks of a llama")
            known = _with_kind(known, "llama", [_reset(job, run) for run in [*_family("llama", device)][1:]])
    return _with_crowd(known, *crowds) if crowds else known


def _run(family: str, size: tuple[int, int, int], device: DeviceKind, layers: int = 2) -> Run:
    """Return a run of a small model of a family."""
    hidden, tokens, samples = size
    model = _FAMILIES[family](layers=layers, hidden=hidden, heads=_HEADS, seq=tokens)
    return Run(model=model, microbatches=4, micro_batch_size=samples, schedule="1f1b", steps=1000, device=device)


def _family(family: str, device: DeviceKind) -> Iterator[Run]:
    """Yield a run of one small block, one of several, and two of larger blocks."""
    yield _run(family, _SMALL, device, _FEW)
    yield _run(family, _SMALL, device, _MANY)
    yield _run(family, _MIDDLE, device)
    yield _run(family, _LARGE, device)


def _changed(run: Run, changed: Mapping[str, Any]) -> Run:
    """Return a run with other fields, of which ``moe`` is one of its model."""
    model = replace(run.model, moe=changed["moe"]) if "moe" in changed else run.model
    return replace(run, model=model, **{name: value for name, value in changed.items() if name != "moe"})


def _reset(job: Job, run: Run) -> Measured:
    """Take steps of another run on the job's actors."""
    job.reset(run)
    return _taken(job, run)


def _taken(job: Job, run: Run) -> Measured:
    """Take steps of the job's run, and return what they took."""
    timelines: list[Timeline] = []
    reports: list[Report] = []
    for _ in range(_STEPS):
        reports.append(job.step())
        timelines.append(job.timeline())
    ops: dict[Op, list[float]] = {}
    for timeline in timelines[1:]:
        for event in timeline.events:
            if event.bucket is None:
                ops.setdefault(event.action.op, []).append(event.end - event.start)
    spans = [max(e.end for e in one.events) - min(e.start for e in one.events) for one in timelines[1:]]
    between = [report.step_ms / 1e3 - span for report, span in zip(reports[1:], spans, strict=True)]
    messages = [sorted(ops[op])[: max(1, len(ops[op]) // 2)] for op in (*SENDS, *RECVS) if op in ops]  # the others wait
    later = _usual(ops[Op.W]) if Op.W in ops else 0.0
    return Measured(
        run,
        _usual(ops[Op.F]),
        _usual(ops[Op.I]) + later if Op.I in ops else _usual(ops[Op.B]),
        later,
        _usual(ops[Op.STEP]),
        statistics.median(seconds for each in messages for seconds in each) if messages else 0.0,
        _usual(spans),
        _usual(between),
        max(reports[-1].peak_memory or [0]),
    )


def _usual(seconds: Sequence[float]) -> float:
    """Return the mean without the shortest and the longest quarter."""
    cut = len(seconds) // 4
    return statistics.fmean(sorted(seconds)[cut : len(seconds) - cut])


def _with_actions(known: Calibration, found: Sequence[Measured]) -> Calibration:
    """Return a calibration with what an action takes whatever its blocks, by one small block and several."""
    few, many = (_uncounted(known, one) for one in found[:2])
    return replace(
        known,
        action_forward=_without_blocks(few.forward, many.forward),
        action_backward=_without_blocks(few.backward, many.backward),
    )


def _without_blocks(few: float, many: float) -> float:
    """Solve action + _FEW * block = few and action + _MANY * block = many for the seconds of the action."""
    return max(0.0, (_MANY * few - _FEW * many) / (_MANY - _FEW))


def _with_kind(known: Calibration, kind: Kind, found: Sequence[Measured]) -> Calibration:
    """Return a calibration with what the blocks of runs took beyond what it says of them."""
    besides: list[Beside] = []
    for one in found:
        model = one.run.model
        assert isinstance(model, Transformer)
        left = _uncounted(known, one, slower=known.busy if one.run.mesh.size > 1 else 1.0)
        forward, backward = (max(0.0, seconds / model.layers) for seconds in left)
        besides.append(Beside(kind, _size(one.run, kind, model), forward, backward))
    return replace(known, besides=(*known.besides, *besides))


def _with_split(known: Calibration, wholes: Sequence[Measured], halves: Sequence[Measured]) -> Calibration:
    """Return a calibration with what backwards in halves take beyond whole ones, and their W beyond its products."""
    besides: list[Beside] = []
    for whole, half in zip(wholes, halves, strict=True):
        run, model = half.run, half.run.model
        assert isinstance(model, Transformer)
        counted = stage_seconds(run, world_of(run), range(model.layers), 0.0, known)
        found = half.backward - whole.backward, half.later - counted[Op.W]
        longer, apart = (max(0.0, seconds / model.layers) for seconds in found)
        besides.append(Beside("split", _size(run, "split", model), longer, apart))
    return replace(known, besides=(*known.besides, *besides))


def _size(run: Run, kind: Kind, model: Transformer) -> int:
    """Return the size of a block of a kind: see ``Beside``."""
    if kind in _CALLED:
        return counts_of(run, check_run(run)["train"], None).units[0].gathered // model.layers
    return run.micro_batch_size * model.seq // run.mesh.cp * model.hidden


def _uncounted(known: Calibration, one: Measured, slower: float = 1.0) -> Passes:
    """Return what the forward and the backward of a run of one stage took beyond what a calibration knows of them.

    Args:
        known: The calibration.
        one: What was measured.
        slower: How much longer its actors computed because others did at once.
    """
    run = one.run
    assert isinstance(run.model, Transformer)
    parameters = counts_of(run, check_run(run)["train"], None).units[0].gathered / run.model.layers
    counted = stage_seconds(run, world_of(run), range(run.model.layers), parameters, known, tp=run.mesh.tensor_ranks)
    return Passes(one.forward / slower - counted[Op.F], one.backward / slower - counted[Op.B])


def _with_crowd(known: Calibration, operations: Measured, links: Measured) -> Calibration:
    """Return a calibration with what messages take among actors that share cores: so much that it predicts two runs."""

    def longer(field: str, measured: Measured) -> Crowd:
        run, schedule, crowd = measured.run, check_run(measured.run)["train"], known.crowd
        world, counts = world_of(run), counts_of(run, schedule, None)
        least, most = 0.0, measured.span
        for _ in range(_HALVINGS):
            half = replace(crowd, **{field: (least + most) / 2})
            span = from_calibration(run, world, counts, schedule, replace(known, crowd=half)).timeline.makespan
            least, most = (least, (least + most) / 2) if span > measured.span else ((least + most) / 2, most)
        return replace(crowd, **{field: least})

    known = replace(known, crowd=longer("operation", operations))
    return replace(known, crowd=longer("link", links))


def _process(found: Measured) -> int:
    """Return the bytes of an actor's process without what its run needs."""
    run, schedule = found.run, check_run(found.run)["train"]
    world, counts = world_of(run), counts_of(run, schedule, None)
    memory = worker_memory(run, world, counts, from_flops(run, world, counts, schedule).timeline)[0]
    return max(1, found.peak - (memory.peak - memory.process))


def _update(found: Sequence[Measured]) -> Update:
    """Solve for what the update takes by tensor and by parameter."""
    steps = [one.step for one in found]
    sizes = [num_parameters(one.run.model) for one in found if isinstance(one.run.model, GPT | Llama)]
    tensors = [_tensors(one.run) for one in found]
    parameter = max(0.0, (steps[-1] - steps[0]) / (sizes[-1] - sizes[0]))
    tensor = max(0.0, (steps[1] - steps[0] - parameter * (sizes[1] - sizes[0])) / (tensors[1] - tensors[0]))
    return Update(max(0.0, steps[0] - tensor * tensors[0] - parameter * sizes[0]), tensor, parameter)


def _tensors(run: Run) -> int:
    """Return the number of a run's tensors of weights."""
    return sum(units.tensors for units in counts_of(run, check_run(run)["train"], None).units)
