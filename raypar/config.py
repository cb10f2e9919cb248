"""A run as plain, frozen data, and everything that can be wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from raypar.actors.data import data_faults
from raypar.actors.mesh import Mesh
from raypar.actors.plan import Recompute
from raypar.actors.specs import GPT, SGD, AdamW, Batches, Layers, Text
from raypar.actors.split import Split, gpt_costs, split_faults
from raypar.fields import type_faults
from raypar.program import Programs, programs_of
from raypar.schedules.schedule import Schedule, ScheduleError


class ConfigError(ValueError):
    """A user's mistakes, all of them, each with its fix; raised before any actor starts."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(f"- {fault}" for fault in faults))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.faults,)


@dataclass(frozen=True)
class Run:
    """A training run: what is trained, on which actors, in which order, for how long."""

    model: GPT | Layers = field(default_factory=GPT)
    """what is trained: a GPT, or the user's own Layers"""
    mesh: Mesh = field(default_factory=Mesh)
    """how the work is split; ``Mesh(pp=2)`` is two pipeline ranks"""
    schedule: str | Schedule = "1f1b"
    """a name (naive, gpipe, 1f1b, interleaved), a CSV file, or a Schedule"""
    chunks: int | None = None
    """stages a rank holds; None is the schedule's own default (2 for interleaved, else 1)"""
    microbatches: int = 4
    """a step's batch is so many microbatches ..."""
    micro_batch_size: int = 2
    """... of so many samples each"""
    data: Text | Batches = field(default_factory=Text)
    """Text, or the user's own Batches"""
    optim: AdamW | SGD = field(default_factory=AdamW)
    """AdamW or SGD, with the learning-rate schedule"""
    clip: float | None = 1.0
    """largest global gradient norm; None does not clip"""
    recompute: Recompute = "none"
    """full keeps only the inputs of a stage and runs its forward again before its backward"""
    split: Split = "even"
    """layers to stages: even, balanced by cost, or a count for each stage"""
    seed: int = 0
    """of initial weights, data order and dropout"""
    steps: int = 100
    """length of the run; the learning rate decays over it"""
    eval_every: int = 0
    """evaluate every so many steps, and at the end; 0: only at the end"""
    eval_steps: int = 4
    """steps of an evaluation: so many times ``microbatches`` microbatches"""
    threads: int = 1
    """CPU threads of an actor"""
    timeout: float = 300.0
    """seconds that an actor may wait for another one before the run fails"""


def check_run(run: Run) -> Programs:
    """The run's schedules, lowered and checked; raises ConfigError with all that is wrong with the run."""
    mistyped = list(type_faults(run, Run))
    if mistyped:
        raise ConfigError(mistyped)  # nothing else can be asked of them
    faults = [*_size_faults(run), *_model_faults(run.model), *_optim_faults(run), *_mesh_faults(run.mesh)]
    programs: Programs | None = None
    if min(run.mesh.pp, run.microbatches, run.chunks or 1) >= 1:
        try:
            programs = programs_of(run.schedule, run.mesh.pp, run.microbatches, run.chunks)
            faults += _split_faults(run, programs["train"].num_stages)
        except ScheduleError as error:
            faults.append(str(error))
    faults += _data_faults(run)
    if faults or programs is None:
        raise ConfigError(faults)
    return programs


def _size_faults(run: Run) -> Iterator[str]:
    for name in ("microbatches", "micro_batch_size", "steps", "eval_steps", "threads"):
        if getattr(run, name) < 1:
            yield f"{name} is {getattr(run, name)}: it must be at least 1"
    if run.chunks is not None and run.chunks < 1:
        yield f"chunks is {run.chunks}: it must be at least 1"
    if run.eval_every < 0:
        yield f"eval_every is {run.eval_every}: use 0 to evaluate only at the end"
    if run.clip is not None and not run.clip > 0:
        yield f"clip is {run.clip}: it must be above 0; None does not clip"
    if not run.timeout > 0:
        yield f"timeout is {run.timeout}: it must be above 0 seconds"


def _model_faults(model: GPT | Layers) -> Iterator[str]:
    if isinstance(model, Layers):
        return
    small = [name for name in ("layers", "hidden", "heads", "seq", "vocab", "mlp") if getattr(model, name) < 1]
    yield from (f"model.{name} is {getattr(model, name)}: it must be at least 1" for name in small)
    if "heads" not in small and model.hidden % model.heads:
        below = range(min(model.heads, model.hidden), 0, -1)
        near = next(heads for heads in below if model.hidden % heads == 0)
        yield f"model.hidden {model.hidden} is not a multiple of model.heads {model.heads}: use {near} heads, say"
    if not 0 <= model.dropout < 1:
        yield f"model.dropout is {model.dropout}: it must be at least 0 and below 1"


def _optim_faults(run: Run) -> Iterator[str]:
    optim = run.optim
    if not optim.lr > 0:
        yield f"optim.lr is {optim.lr}: it must be above 0"
    if optim.warmup < 0:
        yield f"optim.warmup is {optim.warmup}: it must be 0 or more steps"
    if optim.weight_decay < 0:
        yield f"optim.weight_decay is {optim.weight_decay}: it must be 0 or more"
    if not 0 <= optim.final <= 1:
        yield f"optim.final is {optim.final}: it is a share of lr, between 0 and 1"
    if isinstance(optim, AdamW):
        if not all(0 <= beta < 1 for beta in optim.betas):
            yield f"optim.betas are {optim.betas}: both must be at least 0 and below 1"
        if not optim.eps > 0:
            yield f"optim.eps is {optim.eps}: it must be above 0"
    elif not 0 <= optim.momentum < 1:
        yield f"optim.momentum is {optim.momentum}: it must be at least 0 and below 1"


def _mesh_faults(mesh: Mesh) -> Iterator[str]:
    yield from mesh.faults()
    for axis, what in (("dp", "data"), ("cp", "context"), ("tp", "tensor"), ("ep", "expert")):
        if getattr(mesh, axis) > 1:
            yield f"mesh.{axis} is {getattr(mesh, axis)}: {what} parallelism does not compute yet: set it to 1"


def _split_faults(run: Run, num_stages: int) -> list[str]:
    if isinstance(run.model, GPT):
        if run.model.layers < 1:
            return []
        return split_faults(run.split, len(gpt_costs(run.model)), num_stages)
    from raypar.actors.models.build import build_model  # imports torch: only for models that only torch can count

    try:
        model = build_model(run.model, run.seed)
    except Exception as error:
        return [f"model.fn failed: {type(error).__name__}: {error}"]
    return split_faults(run.split, len(model.body), num_stages)


def _data_faults(run: Run) -> list[str]:
    if isinstance(run.data, Batches):
        return []
    if run.model.seq is None:
        return [
            "data is text, but the model has no sequence length: give Layers(seq=..., vocab=...), or data=Batches(fn)"
        ]
    if run.model.seq < 1 or run.model.vocab < 1:
        return []
    return [f"data.{fault}" for fault in data_faults(run.data, run.model.seq, run.model.vocab)]
