"""The user's own modules as a model."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor, nn

from raypar.actors.deferred import Recording, record, seeded
from raypar.actors.models.model import Divide, Model, Values, undivided, unwrap
from raypar.actors.seeds import derive
from raypar.actors.specs import Layers

log = logging.getLogger(__name__)


class LayersModel(Model):
    """The layers ``layers.0``, ``layers.1``, ...; a parameter that two of them share is one logical weight.

    Initial values are whatever ``fn`` gives them, drawn under the run's seed.
    """

    def __init__(self, layers: Layers, seed: int) -> None:
        self._spec = layers
        self._recording: Recording | None
        try:
            modules, self._recording = record(layers.fn, seed)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            # A function that looks at its values needs real ones: the whole model is built here, for a moment.
            log.info("the model can't be built without its weights (%s); every actor builds all of it", error)
            modules, self._recording = _build_real(layers, seed), None
        if not modules or not all(isinstance(module, nn.Module) for module in modules):
            raise ValueError("model.fn must return a list of nn.Modules, one or more")
        self.names = tuple(f"layers.{i}" for i in range(len(modules)))
        self.body = range(len(modules))
        self.costs = tuple(1.0 + sum(p.numel() for p in module.parameters()) for module in modules)
        self.ties = _shared(self.names, modules)
        super().__init__(modules)

    def materialize(self, layers: Sequence[int], seed: int, divide: Divide = undivided) -> list[nn.Module]:
        assert divide is undivided, "the config refuses it"
        own = [self.skeleton[index] for index in layers]
        if self._recording is not None:
            self._recording.materialize(own, seed)
        return own

    def loss(self, output: Values, target: Values) -> Tensor:
        loss: Tensor = self._spec.loss(unwrap(output), unwrap(target))
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"the loss must be one floating number, it is {shape}: return the mean over the microbatch"
            )
        return loss.reshape(())


def _build_real(layers: Layers, seed: int) -> list[nn.Module]:
    with seeded(derive(seed, "build")):
        return list(layers.fn())


def _shared(names: Sequence[str], modules: Sequence[nn.Module]) -> tuple[tuple[str, str], ...]:
    """Pairs (home, copy) of the parameters that stand in more than one layer and train; frozen ones stay equal."""
    homes: dict[int, str] = {}
    ties = []
    for layer, module in zip(names, modules, strict=True):
        for inner, parameter in module.named_parameters():
            name = f"{layer}.{inner}"
            home = homes.setdefault(id(parameter), name)
            if home != name and parameter.requires_grad:
                ties.append((home, name))
    return tuple(ties)
