"""A model made of the user's own modules."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from raypar.actors.models.base import Divide, Model, undivided
from raypar.actors.models.deferred_init import Recording, as_kind_of, has_strays, on_meta, record, seeded, slots_of
from raypar.actors.models.user_plan import tensor_plan_of
from raypar.actors.rng import derive
from raypar.actors.sharding import Cut
from raypar.actors.specs.model import Layers
from raypar.actors.tensors import Values, unwrap

log = logging.getLogger(__name__)

_NO_LAYERS = "model.fn must return a list of nn.Modules, one or more"


class LayersModel(Model):
    """A model of user layers, called ``layers.0``, ``layers.1``, ...

    A parameter that two layers share is one logical weight. The initial values are those that the user's ``fn`` gives,
    drawn under the run's seed. The user's plan says which modules tensor parallelism divides.

    Args:
        layers: The user's function, loss and plan.
        seed: The run's seed.

    Raises:
        ValueError: ``fn`` does not return a list of one or more modules.
    """

    def __init__(self, layers: Layers, seed: int) -> None:
        self._spec = layers
        modules, self._recording = _built(layers, seed)
        if not modules or not _are_modules(modules):
            raise ValueError(_NO_LAYERS)
        self.names = tuple(f"layers.{i}" for i in range(len(modules)))
        self.body = range(len(modules))
        self.costs = tuple(1.0 + sum(p.numel() for p in module.parameters()) for module in modules)
        self.ties = _shared(self.names, modules)
        self.tensor_plan, self.halves = tensor_plan_of(layers.plan), layers.halves
        super().__init__(modules)

    def materialize(self, layers: Sequence[int], seed: int, divide: Divide = undivided) -> list[nn.Module]:
        """Make some layers with their initial weights; see ``Model.materialize``."""
        if divide is not undivided:
            return self._materialize_parts(layers, seed, divide)
        own = [self.skeleton[index] for index in layers]
        if self._recording is not None:
            self._recording.materialize(own, seed)
        return own

    def _materialize_parts(self, layers: Sequence[int], seed: int, divide: Divide) -> list[nn.Module]:
        """Make divided copies of some layers, with this actor's part of each weight.

        The copies are divided on the meta device first. Then whole weights are made for one layer at a time and cut, to
        save memory. The skeleton stays undivided, because every actor takes names and shapes from it.
        """
        own = _copied(self.skeleton, layers)
        whole = {name: tensor for index in layers for *_, name, tensor in _slots(str(index), own[str(index)])}
        named = _divided(divide, own)
        cuts = {id(whole[name]): cut for name, cut in named.items()}
        made: dict[int, Tensor] = {}
        for index in layers:
            slots = [slot for slot in _slots(str(index), own[str(index)]) if slot[2] in whole]
            new = {id(whole[name]): whole[name] for *_, name, _ in slots if id(whole[name]) not in made}
            values = new.values() if self._recording is None else self._recording.values(new.values(), seed)
            for (key, tensor), value in zip(new.items(), values, strict=True):
                part = value if key not in cuts else cuts[key].take(value).clone()
                made[key] = tensor if part is tensor else as_kind_of(tensor, part)
            for table, inner, name, _ in slots:
                table[inner] = made[id(whole[name])]
            if any(name.startswith(f"{index}.") for name in named):
                _annotate(own[str(index)])
        return [own[str(index)] for index in layers]

    def loss(self, output: Values, target: Values) -> Tensor:
        """Call the user's loss function. Raises ValueError if it does not return one floating number."""
        loss: Tensor = self._spec.loss(unwrap(output), unwrap(target))
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"the loss must be one floating number, it is {shape}: return the mean over the microbatch"
            )
        return loss.reshape(())


def _built(layers: Layers, seed: int) -> tuple[list[nn.Module], Recording | None]:
    """Build the user's modules, if possible without their weights.

    Returns:
        The modules on the meta device and the recording that makes their weights; or, if the build can't be recorded,
        the modules with their weights and None.
    """
    try:
        modules, recording = record(layers.fn, seed)
        if not _are_modules(modules) or not has_strays(modules):
            return modules, recording
        reason = "it has tensors that are more than a parameter, a buffer or an attribute"
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        reason = str(error)  # it reads values of its tensors, for example
    log.info("the model can't be built without its weights (%s); every actor builds all of it, for a moment", reason)
    return _build_real(layers, seed), None


def _are_modules(built: Sequence[object]) -> bool:
    return all(isinstance(module, nn.Module) for module in built)


def _build_real(layers: Layers, seed: int) -> list[nn.Module]:
    """Build the user's modules with their weights. Raises ValueError if ``fn`` does not return a list."""
    with seeded(derive(seed, "build")):
        built = layers.fn()
    if not isinstance(built, Iterable):
        raise ValueError(_NO_LAYERS)
    return list(built)


def _copied(modules: Sequence[nn.Module], layers: Sequence[int]) -> nn.ModuleDict:
    """Copy some modules, without copying their tensors. Submodules that they share, the copies share too.

    Returns:
        The copies by index, as strings.
    """
    chosen = [modules[index] for index in layers]
    parts = [part for module in chosen for part in module.modules()]
    kept = {id(tensor): tensor for part in parts for _, _, tensor in slots_of(part)}
    return nn.ModuleDict({str(index): copy for index, copy in zip(layers, deepcopy(chosen, kept), strict=True)})


def _divided(divide: Divide, own: nn.ModuleDict) -> Mapping[str, Cut]:
    """Divide layers in place, in one call, so that a module that two layers share is divided once.

    Returns:
        The cut of each divided parameter, by "<layer index>.<name inside the layer>".
    """
    cuts: dict[str, Cut] = {}

    def build() -> Iterable[nn.Module]:
        cuts.update(divide("layers", own))
        return ()

    on_meta(build)
    return cuts


def _slots(prefix: str, layer: nn.Module) -> list[tuple[dict[str, Any], str, str, Tensor]]:
    """Return where each tensor of a layer stands: (a module's dict, its name there, its full name, the tensor).

    Full names start with ``prefix``.
    """
    return [
        (table, inner, f"{path}.{inner}", tensor)
        for path, module in layer.named_modules(prefix=prefix)
        for table, inner, tensor in slots_of(module)
    ]


def _annotate(layer: nn.Module) -> None:
    """Wrap a divided layer's forward so that torch's errors, such as a wrong shape, get a note on the likely cause."""
    forward = layer.forward

    def annotated(*values: Tensor) -> Any:
        try:
            return forward(*values)
        except RuntimeError as error:
            if type(error) is RuntimeError:  # torch's own errors; subclasses come from others
                error.add_note(
                    "(of what a column linear layer makes, an actor has only a part: view it with -1, "
                    "or count the features and heads that are there, and end with a row linear layer)"
                )
            raise

    layer.forward = annotated


def _shared(names: Sequence[str], modules: Sequence[nn.Module]) -> tuple[tuple[str, str], ...]:
    """Return the pairs (home, copy) of trainable parameters that several layers share.

    Frozen ones are left out: their copies stay equal anyway.
    """
    homes: dict[int, str] = {}
    ties = []
    for layer, module in zip(names, modules, strict=True):
        for inner, parameter in module.named_parameters():
            name = f"{layer}.{inner}"
            home = homes.setdefault(id(parameter), name)
            if home != name and parameter.requires_grad:
                ties.append((home, name))
    return tuple(ties)
