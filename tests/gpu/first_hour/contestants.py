"""Who trains a row: raypar on one actor, or what a user of torch would write; and the kernels of their steps."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import raypar as rp
from raypar.actors.machine.device import ComputeDevice, device_of
from tests.bench.trainer import LocalTrainer, Trainer
from tests.gpu.first_hour.kernels import KernelRecorder, StepKernels, begin_in_actor, end_in_actor
from tests.gpu.first_hour.outcome import NotPossibleError

OURS: dict[str, dict[str, Any]] = {  # raypar's contestants: fields of their runs
    "raypar": {},
    "raypar-compiled": {"compile": True},
    "raypar-graphs": {"compile": "graphs"},
    "raypar-fp8": {"precision": rp.Precision("fp8")},
}
_ANSWER = 120.0  # seconds in which an actor begins and ends a record


def build(contestant: str, run: rp.Run) -> Trainer:
    """Return a contestant's training, ready for its first step. Only what it needs is imported.

    Raises NotPossibleError if this machine lacks what it needs.
    """
    if contestant in OURS:
        run = replace(run, **OURS[contestant])
        if run.compile and run.device == "cpu":
            raise NotPossibleError("on a CPU raypar's compiler takes minutes, and a C++ compiler: its rows need a GPU")
        return raypar_trainer(run)
    place = device_of("cuda" if run.device == "cuda" else "cpu")
    place.enter()
    return _PLAIN[contestant](run, place)


def record_step(trainer: Trainer, number: int) -> StepKernels:
    """Let a training take a step, and return the kernels that it ran."""
    if isinstance(trainer, LocalTrainer):
        recorder = KernelRecorder()
        trainer.train(number, 1)
        return recorder.end()
    import ray

    job: Any = getattr(trainer, "job", None)  # what only raypar's trainer has
    (actor,) = job._lifetime.actors.handles
    ray.get(actor.__ray_call__.remote(begin_in_actor), timeout=_ANSWER)
    trainer.train(number, 1)
    found: StepKernels = ray.get(actor.__ray_call__.remote(end_in_actor), timeout=_ANSWER)
    return found


def raypar_trainer(run: rp.Run) -> Trainer:
    """Return a job of raypar. Raises NotPossibleError without Ray."""
    try:
        from tests.bench.local_ray import quiet
        from tests.bench.ours import RayparTrainer
    except ImportError as error:
        raise NotPossibleError(f"Ray is not here: {error}") from error
    quiet()
    return RayparTrainer(run)


def _torch(compiled: bool) -> Callable[[rp.Run, ComputeDevice], Trainer]:
    def build_plain(run: rp.Run, place: ComputeDevice) -> Trainer:
        from tests.bench.peers.whole import whole_model

        compiler = compiler_of(place) if compiled else None
        return LocalTrainer(whole_model(run, 0, place.device, compiler=compiler), place=place)

    return build_plain


def _nanochat_like(run: rp.Run, place: ComputeDevice) -> Trainer:
    from tests.gpu.first_hour.nanochat_like import nanochat_like

    return nanochat_like(run, place, compiler_of(place))


def _fsdp2(run: rp.Run, place: ComputeDevice) -> Trainer:
    """One rank, as torchrun would start it."""
    from tests.bench.peers.fsdp import fsdp

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return fsdp(run, place)


def compiler_of(place: ComputeDevice) -> str:
    """Return the backend of torch.compile: on CPUs, for small sizes, the one that needs no C++ compiler."""
    return "inductor" if place.kind == "cuda" else "eager"


_PLAIN: dict[str, Callable[[rp.Run, ComputeDevice], Trainer]] = {
    "torch": _torch(compiled=False),
    "torch-compiled": _torch(compiled=True),
    "nanochat-like": _nanochat_like,
    "fsdp2": _fsdp2,
}
