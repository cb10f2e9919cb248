"""Short runs of small models on a job's actors: the durations of their actions and updates."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, NamedTuple

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind
from raypar.job.job import Job
from raypar.job.launch import launch
from raypar.planner.calibrated.calibration import Family, Kind
from raypar.schedules.action import RECVS, SENDS, Op
from raypar.schedules.float_sum import float_sum
from raypar.schedules.timeline import Timeline


class _Size(NamedTuple):
    """The size of a short run's model and microbatches."""

    hidden: int
    tokens: int
    samples: int
    layers: int


_LEAST_STEPS, _MOST_STEPS = 4, 13  # of each run; the first step also warms up
_ENOUGH = 0.3  # seconds of steps
_ROUNDS = 10  # most repetitions of each run, against the noise of other processes
FEW, MANY = 1, 5  # blocks of the two smallest models, whose difference is due to blocks alone
_SMALL = _Size(hidden=32, tokens=32, samples=1, layers=FEW)
_LARGER = (_Size(64, 128, 2, layers=2), _Size(192, 128, 2, layers=2), _Size(256, 256, 2, layers=1))
_HEAD_SIZE = 32
_FAMILIES: Mapping[Family, type[GPT] | type[Llama]] = {"gpt": GPT, "llama": Llama}
_EXPERTS = MoE(experts=4, top_k=2)
_CALLED: Mapping[str, str] = {
    "gpt": "blocks of a gpt",
    "reduced": "replicas",
    "split": "backwards in halves",
    "pipeline": "stages and messages between them",
    "tensor": "blocks with tp=2",
    "sequence": "blocks with tp=2 and sequence parallelism",
    "context": "blocks with cp=2",
    "lent": "blocks with zero=2, whose gradients are in buckets for a while",
    "gathered": "blocks with zero=3, whose weights are gathered",
    "llama": "blocks of a llama",
}


@dataclass(frozen=True)
class Measured:
    """The measured durations and memory of a run of a few steps.

    Attributes:
        run: The run.
        forward: Seconds of a forward.
        backward: Seconds of a backward, of both halves if it is split.
        ends: Seconds by which the first and the last backward of a step together exceed those between.
        later: Seconds of the W; 0 if the backward is whole.
        last_forward: Seconds by which a forward of the last stage exceeds one of the first.
        last_backward: Seconds by which its backward does.
        step: Seconds of a STEP that waits for no other actor: the lower quartile.
        message: Median seconds of a SEND, and of a RECV whose message had arrived; 0 without messages.
        between: Seconds of a step outside of actions.
        peak: Bytes of the largest process.
    """

    run: Run
    forward: float
    backward: float
    ends: float
    later: float
    last_forward: float
    last_backward: float
    step: float
    message: float
    between: float
    peak: float


def probed(
    device: DeviceKind, actors: int, say: Callable[[str], object], late: Callable[[], bool]
) -> dict[str, Sequence[Measured]]:
    """Perform the short runs, the most important ones first, and repeat all while time is left.

    Args:
        device: Device of the actors.
        actors: Number of actors that can compute at once without sharing a core, at least 2.
        say: Called with a line for each measurement.
        late: Returns whether the remaining measurements must be left out.

    Returns:
        By name, the medians of the rounds. "gpt" and "first" are always among them.
    """
    runs = probe_runs(device, actors)
    say(f"launching {actors} actors for short runs")
    rounds: dict[str, list[list[Measured]]] = {}
    with launch(replace(runs["gpt"][2], mesh=Mesh(dp=actors))) as job:
        first = _taken(job, job.run)  # on new actors: a process keeps the memory that it has allocated once
        for run in runs["reduced"]:  # not counted: new actors are slower
            _reset(job, run)
        for number in range(_ROUNDS):
            for name, each in runs.items():
                called = _CALLED.get(name, f"blocks with {name}")
                if late() and name != "gpt":
                    if not number:
                        say(f"{called}: left out, for lack of time")
                    continue
                if not number:
                    say(called)
                rounds.setdefault(name, []).append([_reset(job, run) for run in each])
            if late():
                break
            say("once more" if not number else "and again")
    found = {name: [median_of(each) for each in zip(*taken, strict=True)] for name, taken in rounds.items()}
    return {"first": [first], **found}


def probe_runs(device: DeviceKind, actors: int) -> dict[str, list[Run]]:
    """Return the short runs by purpose; the arguments are those of ``probed``.

    "gpt" and "llama" have one small block, several, and larger blocks of three sizes; the kinds of ``Beside`` have the
    larger sizes, a "pipeline" stages of the small block, too.
    """
    gpt = [*_family("gpt", device)]
    larger = gpt[2:]
    with_: Mapping[Kind, Mapping[str, Any]] = {
        "reduced": {"mesh": Mesh(dp=actors)},
        "split": {"backward": "split"},
        "tensor": {"mesh": Mesh(tp=2)},
        "lent": {"mesh": Mesh(dp=2), "zero": 2},
        "gathered": {"mesh": Mesh(dp=2), "zero": 3},
        "context": {"mesh": Mesh(cp=2)},
        "sequence": {"mesh": Mesh(tp=2), "sequence_parallel": True},
    }
    experts: Mapping[Kind, Mapping[str, Any]] = {
        "experts": {"moe": _EXPERTS},
        "expert parallel": {"moe": _EXPERTS, "mesh": Mesh(dp=2, ep=2)},
    }
    stages = [_run("gpt", size._replace(layers=2 * size.layers), device) for size in (_SMALL, *_LARGER)]
    return {
        "gpt": gpt,
        **{kind: [replace(run, **changed) for run in larger] for kind, changed in with_.items()},
        "pipeline": [replace(run, mesh=Mesh(pp=2), backward="whole") for run in stages],
        "llama": [*_family("llama", device)][1:],
        **{kind: [_changed(run, changed) for run in larger] for kind, changed in experts.items()},
    }


def _run(family: Family, size: _Size, device: DeviceKind) -> Run:
    """Return a run of a small model of a family."""
    model = _FAMILIES[family](layers=size.layers, hidden=size.hidden, heads=size.hidden // _HEAD_SIZE, seq=size.tokens)
    return Run(model=model, microbatches=4, micro_batch_size=size.samples, schedule="1f1b", steps=1000, device=device)


def _family(family: Family, device: DeviceKind) -> Iterator[Run]:
    """Yield a run of one small block, one of several, and those of larger blocks."""
    for size in (_SMALL, _SMALL._replace(layers=MANY), *_LARGER):
        yield _run(family, size, device)


def _changed(run: Run, changed: Mapping[str, Any]) -> Run:
    """Return a run with changed fields; ``moe`` is a field of its model."""
    of_run = {name: value for name, value in changed.items() if name != "moe"}
    return replace(run, model=replace(run.model, moe=changed["moe"]), **of_run)


def _reset(job: Job, run: Run) -> Measured:
    """Take steps of another run on the job's actors."""
    job.reset(run)
    return _taken(job, run)


def _taken(job: Job, run: Run) -> Measured:
    """Take steps of the job's run, and return their measurements."""
    timelines: list[Timeline] = []
    step_ms: list[float] = []
    while len(step_ms) < _MOST_STEPS and (len(step_ms) < _LEAST_STEPS or float_sum(step_ms) < 1e3 * _ENOUGH):
        report = job.step()
        step_ms.append(report.step_ms)
        timelines.append(job.timeline())
    of_stage: dict[Op, dict[int | None, list[float]]] = {}
    for timeline in timelines[1:]:
        for event in timeline.events:
            if event.bucket is None:
                lengths = of_stage.setdefault(event.action.op, {})
                lengths.setdefault(event.action.stage, []).append(event.end - event.start)
    ops = {op: [*chain(*lengths.values())] for op, lengths in of_stage.items()}
    spans = [max(e.end for e in one.events) - min(e.start for e in one.events) for one in timelines[1:]]
    between = [ms / 1e3 - span for ms, span in zip(step_ms[1:], spans, strict=True)]
    messages = [sorted(ops[op])[: max(1, len(ops[op]) // 2)] for op in (*SENDS, *RECVS) if op in ops]  # the others wait
    later = _usual(ops[Op.W]) if Op.W in ops else 0.0
    return Measured(
        run,
        _usual(ops[Op.F]),
        _usual(ops[Op.I]) + later if Op.I in ops else _usual(ops[Op.B]),
        statistics.median(map(_ends, timelines[1:])),
        later,
        _longer(of_stage[Op.F]),
        _longer(of_stage.get(Op.B, {})),
        _quartile(ops[Op.STEP]),
        statistics.median(seconds for each in messages for seconds in each) if messages else 0.0,
        _usual(between),
        max(report.peak_memory or [0]),
    )


def _ends(timeline: Timeline) -> float:
    """Return the seconds by which the first and last backward of a row exceed those between, on average."""
    rows: dict[int, dict[int, float]] = {}
    for event in timeline.events:
        if event.bucket is None and event.action.op in (Op.B, Op.I, Op.W):
            row, microbatch = rows.setdefault(event.rank, {}), event.action.microbatch or 0
            row[microbatch] = row.get(microbatch, 0.0) + event.end - event.start
    found = []
    for row in rows.values():
        first, *inner, last = [seconds for _, seconds in sorted(row.items())]
        found.append(first + last - 2 * statistics.fmean(inner) if inner else 0.0)
    return statistics.fmean(found)


def _longer(of_stage: Mapping[int | None, Sequence[float]]) -> float:
    """Return the seconds by which an op of the last stage exceeds that of the first one."""
    each = [_usual(seconds) for _, seconds in sorted(of_stage.items(), key=lambda one: one[0] or 0)]
    return each[-1] - each[0] if each else 0.0


def _usual(seconds: Sequence[float]) -> float:
    """Return the mean without the shortest and the longest tenth."""
    cut = len(seconds) // 10
    return statistics.fmean(sorted(seconds)[cut : len(seconds) - cut])


def _quartile(seconds: Sequence[float]) -> float:
    """Return the lower quartile."""
    return sorted(seconds)[len(seconds) // 4]


def median_of(rounds: Sequence[Measured]) -> Measured:
    """Return the medians of a run's measurements over several rounds."""
    names = [field.name for field in fields(Measured) if field.name != "run"]
    return Measured(rounds[0].run, **{name: statistics.median(getattr(one, name) for one in rounds) for name in names})
