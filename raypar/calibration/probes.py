"""Short runs of small models, of which it is measured what blocks, actions and updates take besides their products."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.model import GPT, Llama, Transformer
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind
from raypar.config.run import check_run
from raypar.job.job import Job
from raypar.job.launch import launch
from raypar.planner.calibration import Calibration, Family, Layer, Update
from raypar.planner.parameters import num_parameters
from raypar.planner.products import block_products, head_products
from raypar.reporting.report import Report
from raypar.schedules.action import RECVS, SENDS, Op
from raypar.schedules.timeline import Timeline

_STEPS = 6  # of each run; the first one also warms up
_FEW, _MANY = 1, 5  # blocks of the two small models, whose difference is that of blocks alone
_FAMILIES: dict[Family, type[GPT] | type[Llama]] = {"gpt": GPT, "llama": Llama}


@dataclass(frozen=True)
class Measured:
    """What a run of a few steps has taken.

    Attributes:
        run: The run.
        forward: Seconds of a forward.
        backward: Seconds of a backward.
        step: Seconds of the STEP.
        message: Median seconds of a SEND, and of a RECV whose message was there; 0 without messages.
        between: Seconds of a step that are in no action.
    """

    run: Run
    forward: float
    backward: float
    step: float
    message: float
    between: float


@dataclass(frozen=True)
class Probed:
    """What the short runs have told: see the attributes of ``Calibration``."""

    layers: tuple[Layer, ...]
    update: Update
    busy: float
    message: float
    call: float


def probed(
    device: DeviceKind, actors: int, products: Calibration, say: Callable[[str], object], late: Callable[[], bool]
) -> Probed:
    """Take the short runs.

    Args:
        device: Device of the actors.
        actors: As many as compute at once without sharing a core, at least 2.
        products: A calibration with the measured products and attention.
        say: Told what is measured.
        late: Whether it is time to leave out the second family.
    """
    runs = {family: _runs(family, device) for family in _FAMILIES}
    busy_run = replace(runs["gpt"][2], mesh=Mesh(dp=actors))
    say(f"launching {actors} actors for short runs")
    with launch(busy_run) as job:
        busy = _taken(job, busy_run)
        job.reset(pipe := replace(runs["gpt"][2], mesh=Mesh(pp=2)))
        message = _taken(job, pipe).message
        layers: list[Layer] = []
        for family, small in runs.items():
            if layers and late():
                say(f"blocks of a {family}: left out, for lack of time")
                break
            say(f"blocks of a {family}")
            found: list[Measured] = []
            for run in small:
                job.reset(run)
                found.append(_taken(job, run))
            layers.append(_layer(family, found, products))
            if family == "gpt":
                update, alone = _update(found), found
    ratio = (busy.forward + busy.backward) / (alone[2].forward + alone[2].backward)
    call = max(0.0, statistics.median(one.between for one in alone))
    return Probed(tuple(layers), update, min(max(1.0, ratio), float(actors)), message, call)  # at worst on one core


def _runs(family: Family, device: DeviceKind) -> tuple[Run, Run, Run]:
    """Return a run of one small block, one of several, and one of larger blocks."""
    kind = _FAMILIES[family]
    few, many = (kind(layers=layers, hidden=32, heads=2, seq=32) for layers in (_FEW, _MANY))
    small = Run(
        model=few,
        microbatches=4,
        micro_batch_size=1,
        schedule="1f1b",
        steps=1000,
        device=device,
    )
    larger = kind(layers=2, hidden=256, heads=8, seq=256)
    return (
        small,
        replace(small, model=many),
        replace(small, model=larger, micro_batch_size=2),
    )


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
    return Measured(
        run,
        _usual(ops[Op.F]),
        _usual(ops[Op.B]),
        _usual(ops[Op.STEP]),
        statistics.median(seconds for each in messages for seconds in each) if messages else 0.0,
        _usual(between),
    )


def _usual(seconds: Sequence[float]) -> float:
    """Return the lower quartile: other programs only make an action longer."""
    return sorted(seconds)[len(seconds) // 4]


def _layer(family: Family, found: Sequence[Measured], products: Calibration) -> Layer:
    """Solve for what actions, blocks and elements take, from a small block, several, and larger ones."""
    larger = found[2]
    values: list[float] = []
    for way, name in enumerate(("forward", "backward")):
        known = [_products(one.run, products)[way] for one in found]
        taken = [getattr(one, name) for one in found]
        block = max(0.0, ((taken[1] - known[1]) - (taken[0] - known[0])) / (_MANY - _FEW))
        action = max(0.0, taken[0] - known[0] - _FEW * block)
        model = larger.run.model
        assert isinstance(model, Transformer)
        elements = model.layers * larger.run.micro_batch_size * model.seq * model.hidden
        values += [action, block, max(0.0, (taken[2] - known[2] - action - model.layers * block) / elements)]
    return Layer(family, values[0], values[3], values[1], values[4], values[2], values[5])


def _products(run: Run, calibration: Calibration) -> tuple[float, float]:
    """Return the seconds of all products of a run of one stage, forwards and backwards."""
    model = run.model
    assert isinstance(model, Transformer)
    each = [block_products(run, model, block, calibration) for block in range(model.layers)]
    each.append(head_products(run, model, calibration))
    return sum(one.forward for one in each), sum(one.backward for one in each)


def _update(found: Sequence[Measured]) -> Update:
    """Solve for what the update takes by tensor and by parameter."""
    steps = [one.step for one in found]
    sizes = [num_parameters(one.run.model) for one in found if isinstance(one.run.model, GPT | Llama)]
    tensors = [_tensors(one.run) for one in found]
    parameter = max(0.0, (steps[2] - steps[0]) / (sizes[2] - sizes[0]))
    tensor = max(0.0, (steps[1] - steps[0] - parameter * (sizes[1] - sizes[0])) / (tensors[1] - tensors[0]))
    return Update(max(0.0, steps[0] - tensor * tensors[0] - parameter * sizes[0]), tensor, parameter)


def _tensors(run: Run) -> int:
    """Return the number of a run's tensors of weights."""
    from raypar.reporting.needs import counts_of

    return sum(units.tensors for units in counts_of(run, check_run(run)["train"], None).units)
