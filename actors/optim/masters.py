"""The weights that the optimizer updates: masters in another dtype or place, or the layers' weights themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from raypar.actors.models.cast import cast
from raypar.actors.offload_storage import OffloadStorage
from raypar.actors.specs.precision import Precision
from raypar.actors.tensors import dtype_of


class Masters:
    """The weights that the optimizer of one actor updates, by logical name.

    Where the layers' weights have the masters' dtype and are at home, they are the masters: nothing is copied, and
    nothing is done.

    Args:
        home: Where masters, gradients and states are kept.
        model: The layers' parameters that this actor updates, by logical name, in the dtype in which layers compute.
        masters: What the optimizer updates in their place, by logical name; None if the layers' parameters are it.
        copies: What ``publish`` writes the masters into, by logical name; None for the layers' parameters.

    Attributes:
        home: That home.
        parameters: The masters by logical name; each has a gradient after ``take_gradients``.

    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.1.
    """

    def __init__(
        self,
        home: OffloadStorage,
        model: Mapping[str, nn.Parameter],
        masters: Mapping[str, nn.Parameter] | None = None,
        copies: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.home, self.parameters = home, model if masters is None else masters
        pairs = [(model[name], master) for name, master in self.parameters.items()]
        self._apart = [(parameter, master) for parameter, master in pairs if parameter is not master]
        targets = [((model if copies is None else copies)[name], master) for name, master in self.parameters.items()]
        self._copies = [(target, master) for target, master in targets if target is not master]

    @torch.no_grad()
    def take_gradients(self, scale: float = 1.0) -> None:
        """Give every master the gradient of its parameter, in the master's dtype.

        The parameter's own is None afterwards. A gradient that has the master's dtype is not copied, and multiplied in
        place. A master that is away from the device has its gradient already.

        Args:
            scale: Factor of the gradients: 1 / (the scale of the loss).
        """
        for parameter, master in () if self.home.is_apart else self._apart:
            master.grad, parameter.grad = _in_dtype(parameter.grad, master.dtype), None
        if scale != 1.0:
            for _, _, gradient in self.with_gradients(writes=True):
                gradient.mul_(scale)

    def with_gradients(self, *, writes: bool = False) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Yield every master that has a gradient, which is at hand until the next: (logical name, master, gradient).

        Args:
            writes: Whether gradients will be written to.
        """
        for name, master in self.parameters.items():
            if master.grad is not None:
                with self.home.at_hand([master.grad], writes=writes):
                    yield name, master, master.grad

    @torch.no_grad()
    def publish(self) -> None:
        """Write the masters into the layers' parameters, rounded to their dtype."""
        for copy, master in self._copies:
            with self.home.at_hand([master]), self.home.at_hand([copy], writes=True):
                copy.copy_(master)


def masters_of(
    precision: Precision, home: OffloadStorage, layers: Iterable[nn.Module], own: Mapping[str, nn.Parameter]
) -> Masters:
    """Cast layers to the precision of a run, and return the masters of the parameters that an actor updates.

    A master on the device takes over the memory of the weight before the cast.

    Args:
        precision: The run's precision.
        home: Where the masters are kept.
        layers: All layers of the actor, in fp32.
        own: The parameters that it updates, by logical name.
    """
    initial = {name: parameter.detach() for name, parameter in own.items()}
    if precision.is_half:
        cast(layers, dtype_of(precision.compute), dtype_of(precision.reduce))
    masters = {name: master_of(own[name], weight, precision, home) for name, weight in initial.items()}
    return Masters(home, own, masters)


def master_of(parameter: nn.Parameter, initial: Tensor, precision: Precision, home: OffloadStorage) -> nn.Parameter:
    """Return the master of a parameter. It is the parameter itself if that was not cast and is in this home.

    Args:
        parameter: The parameter, cast to the precision.
        initial: The weight before the cast.
        precision: The run's precision.
        home: Where the master is kept.
    """
    weight = initial.to(dtype_of(precision.master)) if initial.dtype == torch.float32 else initial
    if parameter.dtype == weight.dtype and home.holds(parameter):
        return parameter
    return nn.Parameter(home.moved(weight.detach()))


def _in_dtype(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a gradient in a dtype; None if there is none."""
    return None if gradient is None else gradient.to(dtype)
