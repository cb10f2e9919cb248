"""Replaying a recorded stage: the same forwards and backwards in this process, without Ray and without other stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from raypar.actors.collective.replicas import RefusedReplicas, entered
from raypar.actors.machine.device import device_of
from raypar.actors.models.build import build_model
from raypar.actors.models.skip_connections import NO_SKIPS
from raypar.actors.pipeline.stage import Stage
from raypar.actors.pipeline.stage_ends import StageEnds
from raypar.actors.specs.model import GPT, Layers, Llama, Transformer
from raypar.actors.tensors import Values
from raypar.config.arguments import checked_arguments
from raypar.config.fields import field_faults, short_repr
from raypar.config.toml import run_of
from raypar.errors import ConfigError
from raypar.job.stepping.recording import Recorded, read_recording
from raypar.schedules.schedule import first_faults

Tensors = Mapping[str, Tensor]


_OF_OTHERS = "a recording has nothing of other replicas: step by hand, or record a run with mesh.dp 1"


@dataclass(frozen=True, repr=False)
class Replayed:
    """A replayed step of one stage.

    Attributes:
        recorded: The recording's description.
        stage: The stage with its gradients before the reduction over replicas.
        differences: The names of tensors that are not bitwise equal to the recording: outputs (``F3/outputs/0``),
            gradients sent to the previous stage (``B3/outputs/0``), weights' gradients
            (``gradients/blocks.0.mlp.up.weight``).
    """

    recorded: Recorded
    stage: Stage
    differences: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Return whether every output and gradient is bitwise equal to the recording."""
        return not self.differences

    def __repr__(self) -> str:
        what = f"stage {self.recorded.stage} of {self.recorded.actor} in step {self.recorded.step + 1}"
        actions = f"{len(self.recorded.actions)} actions"
        if self.ok:
            return f"{what}: {actions}, bitwise equal to the recording"
        return "\n".join([f"{what}: {actions}, NOT equal to the recording:", *(f"  {one}" for one in self.differences)])


@checked_arguments
def replay(
    path: str | PathLike[str], model: Layers | None = None, *, on: Callable[[str, Stage], object] | None = None
) -> Replayed:
    """Replay a recording of ``Stepper.record``: the stage alone, in this process, with the same inputs and seeds.

    A debugger stops in the model's code as in any other Python code.

    Args:
        path: The recording.
        model: The run's model, needed if it consists of the user's own modules.
        on: Called as ``on(action, stage)`` before each action, ``F3`` or ``B3``, for example to set a breakpoint.

    Returns:
        The stage, and the differences from the recording.

    Raises:
        ConfigError: If the file is not a recording, or not one of this model.
    """
    recorded, tensors = read_recording(Path(path))
    with _as_it_was(recorded), entered(None):
        stage = _build(recorded, tensors, _model_of(recorded, model))
        device = device_of(recorded.device)
        differences: list[str] = []
        for action in recorded.actions:
            if on is not None:
                on(action, stage)
            kind, microbatch = action[0], int(action[1:])
            inputs = device.to(_values(tensors, f"{action}/inputs"))
            if kind == "F":
                target = device.to(_values(tensors, f"{action}/target"))
                outputs = stage.forward(recorded.step, microbatch, inputs, target)
            else:
                outputs = stage.backward(recorded.step, microbatch, inputs)
            found = {f"{action}/outputs/{number}": value for number, value in enumerate(outputs)}
            differences += _unequal(found, tensors, f"{action}/outputs/")
        gradients = {name: p.grad for name, p in stage.parameters().items() if p.grad is not None}
        found = {f"gradients/{name}": gradient for name, gradient in gradients.items()}
        # The gradient of a tied weight is not recorded, because the stage makes only a part of it.
        shared = {name: value for name, value in found.items() if name in tensors}
        differences += _unequal(shared, tensors, "gradients/")
    return Replayed(recorded, stage, tuple(differences))


def _model_of(recorded: Recorded, model: Layers | None) -> GPT | Llama | Layers:
    if "fn" not in recorded.model:
        spec = run_of({"model": recorded.model}).model
        faults = [fault.text for fault in field_faults(spec, "model.")]
        if not faults and isinstance(spec, Transformer):
            faults += spec.faults(lambda *_: True)
        ConfigError.raise_if(faults)
        return spec
    if model is None:
        raise ConfigError(
            [f"the recording is of your own modules, {short_repr(recorded.model['fn'])}: give model=Layers(...)"]
        )
    return model


def _build(recorded: Recorded, tensors: Tensors, spec: GPT | Llama | Layers) -> Stage:
    """Build the stage with its recorded state. Raises ConfigError if the model has other layers or weights."""
    model = build_model(spec, recorded.seed)
    if not recorded.layers or not all(0 <= layer < len(model.names) for layer in recorded.layers):
        layers = short_repr(list(recorded.layers))
        raise ConfigError([f"the recording is of the layers {layers}: the model has {len(model.names)}"])
    shapes = {
        f"state/{model.names[layer]}.{inner}": tensor
        for layer in recorded.layers
        for inner, tensor in model.skeleton[layer].state_dict().items()
    }
    faults = first_faults(
        f"{short_repr(name.removeprefix('state/'))} is {_spelled(tensors.get(name))} in the recording, "
        f"{_spelled(tensor)} in the model"
        for name, tensor in shapes.items()
        if _spelled(tensors.get(name)) != _spelled(tensor)
    )
    ConfigError.raise_if(faults)
    modules = model.materialize(recorded.layers, recorded.seed)
    try:
        device = device_of(recorded.device)
    except RuntimeError as error:
        raise ConfigError([f"the recording is of a GPU ({error}): play it on a machine that has one"]) from error
    device.enter()
    device.settle(modules)
    learns, sends_gradients = (_has_backward(recorded, tensors, kind) for kind in ("inputs", "outputs"))
    stage = Stage(
        model,
        recorded.layers,
        modules,
        device=device,
        is_last=recorded.is_last,
        recompute=recorded.recompute,
        seed=recorded.seed,
        ends=StageEnds(NO_SKIPS, takes_data=not sends_gradients),
        learns=learns,
        replicas=RefusedReplicas(_OF_OTHERS) if "dp=" in recorded.actor else None,
    )
    with torch.no_grad():
        for name, value in stage.state():
            value.copy_(tensors[f"state/{name}"])
    stage.begin(train=True)
    return stage


def _has_backward(recorded: Recorded, tensors: Tensors, kind: str) -> bool:
    """Return whether backwards have gradients as their inputs or outputs (``kind``); True if none was recorded."""
    backwards = [action for action in recorded.actions if action[0] == "B"]
    return not backwards or any(f"{action}/{kind}/0" in tensors for action in backwards)


@contextmanager
def _as_it_was(recorded: Recorded) -> Iterator[None]:
    """Use the recording's number of threads in the block; restore the threads and the random state afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, min(recorded.threads, 1024)))
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)


def _values(tensors: Tensors, folder: str) -> Values:
    """Return copies of the inputs, outputs or targets under a prefix of the recording."""
    values: list[Tensor] = []
    while (found := tensors.get(f"{folder}/{len(values)}")) is not None:
        values.append(found.clone())
    return tuple(values)


def _unequal(found: Tensors, tensors: Tensors, folder: str) -> list[str]:
    """Return the names under a prefix of the recording that are missing in ``found`` or not bitwise equal."""
    wanted = [name for name in tensors if name.startswith(folder)]
    return [name for name in dict.fromkeys([*wanted, *found]) if not _same_bits(found.get(name), tensors.get(name))]


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or _spelled(one) != _spelled(other):
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _spelled(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
