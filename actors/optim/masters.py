"""Master weights, which the optimizer updates: in another dtype or storage, or the layers' weights themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from raypar.actors.autograd.torch_private import copy_each, scale_each
from raypar.actors.machine.offload_storage import PORTION, OffloadStorage
from raypar.actors.models.init.cast import cast
from raypar.actors.portions import portions
from raypar.actors.sharding import Shard
from raypar.actors.specs.precision import Precision
from raypar.actors.tensors import dtype_of, nbytes


class Masters:
    """The weights that the optimizer of one actor updates, by logical name.

    If the layers' weights have the masters' dtype and are in the storage, they are the masters, and nothing is copied.

    Args:
        storage: Storage of masters, gradients and states.
        model: The layers' parameters that this actor updates, by logical name, in the dtype in which layers compute.
        masters: The masters, by logical name; None if they are the layers' parameters.
        copies: The tensors into which ``publish`` writes the masters, by logical name; None for the layers' parameters.
        parts: The spans of those of which the master is a span (elements,), by logical name.

    Attributes:
        storage: The storage.
        parameters: The masters by logical name; each has a gradient after ``take_gradients``.
        parts: The spans of parameters that masters are, by logical name.
        views: The logical names of the masters that are spans of the layers' parameters themselves.
        shapes: The shape of each parameter, which its master is or of which it is a span, by logical name.

    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.1.
    """

    def __init__(
        self,
        storage: OffloadStorage,
        model: Mapping[str, nn.Parameter],
        masters: Mapping[str, nn.Parameter] | None = None,
        copies: Mapping[str, Tensor] | None = None,
        parts: Mapping[str, Shard] = MappingProxyType({}),
    ) -> None:
        self.storage, self.parameters, self.parts = storage, model if masters is None else masters, parts
        self.shapes = {name: tuple(master.shape) for name, master in self.parameters.items()}
        self.shapes |= {name: part.whole for name, part in parts.items()}
        whole = [(model[name], master) for name, master in self.parameters.items() if name not in parts]
        self._copied = [(parameter, master) for parameter, master in whole if parameter is not master]
        targets = {name: one for name, one in model.items() if name not in parts} if copies is None else copies
        pairs = [(targets[name], master) for name, master in self.parameters.items() if name in targets]
        self.views = {name for name in parts if name in targets and targets[name] is self.parameters[name]}
        self._copies: list[tuple[Tensor, nn.Parameter]] = [
            (target, master) for target, master in pairs if target is not master
        ]

    def write_to(self, spans: Mapping[str, Tensor], *, are: bool) -> None:
        """Set where ``publish`` writes masters that are spans of parameters.

        Args:
            spans: Tensors (elements,) with the values of masters, by logical name.
            are: Whether masters of their dtype shall be views of them, so that nothing is copied, if they are in the
                storage of the masters.
        """
        for name, span in spans.items():
            master = self.parameters[name]
            if are and master.dtype == span.dtype and self.storage.holds(span):
                master.data = span
                self.views.add(name)
            else:
                self._copies.append((span, master))

    @torch.no_grad()
    def take_gradients(self, scale: float = 1.0) -> None:
        """Move the gradient of each parameter to its master, in the master's dtype.

        The parameter's gradient is None afterwards. A gradient in the master's dtype is not copied, and is scaled in
        place. A master off the device has its gradient already.

        Args:
            scale: Factor of the gradients: 1 / (the scale of the loss).
        """
        for parameter, master in () if self.storage.is_off_device else self._copied:
            master.grad, parameter.grad = _in_dtype(parameter.grad, master.dtype), None
        if scale != 1.0:
            for gradients in self.gradients(writes=True):
                scale_each(list(gradients.values()), scale)

    def gradients(self, *, writes: bool = False) -> Iterator[dict[str, Tensor]]:
        """Yield the gradients by logical name: on the device all at once, else in portions.

        Those off the device are accessible until the next portion.

        Args:
            writes: Whether gradients will be written to.
        """
        found = {name: master.grad for name, master in self.parameters.items() if master.grad is not None}
        if not self.storage.is_off_device:
            yield found
            return
        for names in portions(found, lambda name: nbytes(found[name]), PORTION):
            portion = {name: found[name] for name in names}
            with self.storage.accessible(portion.values(), writes=writes):
                yield portion

    @torch.no_grad()
    def publish(self) -> None:
        """Write the masters into the layers' parameters, rounded to their dtype."""
        if not self.storage.is_off_device:
            copy_each([copy for copy, _ in self._copies], [master for _, master in self._copies])
            return
        for copy, master in self._copies:
            with self.storage.accessible([master]), self.storage.accessible([copy], writes=True):
                copy.copy_(master)


def masters_of(
    precision: Precision,
    storage: OffloadStorage,
    layers: Iterable[nn.Module],
    own: Mapping[str, nn.Parameter],
    parts: Mapping[str, Shard] = MappingProxyType({}),
) -> Masters:
    """Cast layers to the precision of a run, and return the masters of the parameters that an actor updates.

    A master on the device has the memory of the weight before the cast.

    Args:
        precision: The run's precision.
        storage: Storage of the masters.
        layers: All layers of the actor, in fp32.
        own: The parameters that the actor updates, by logical name, in whole or in part.
        parts: The spans of those that it updates in part.
    """
    initial = {name: p.detach() if name not in parts else _span(parts[name], p, precision) for name, p in own.items()}
    if precision.is_half:
        cast(layers, dtype_of(precision.layers), dtype_of(precision.reduce))
    masters = {
        name: nn.Parameter(storage.moved(_in_master_dtype(weight, precision)))
        if name in parts
        else master_of(own[name], weight, precision, storage)
        for name, weight in initial.items()
    }
    return Masters(storage, own, masters, parts=parts)


def master_of(parameter: nn.Parameter, initial: Tensor, precision: Precision, storage: OffloadStorage) -> nn.Parameter:
    """Return the master of a parameter. It is the parameter itself if that was not cast and is in the storage.

    Args:
        parameter: The parameter, cast to the precision.
        initial: The weight before the cast.
        precision: The run's precision.
        storage: Storage of the master.
    """
    weight = _in_master_dtype(initial, precision)
    if parameter.dtype == weight.dtype and storage.holds(parameter):
        return parameter
    return nn.Parameter(storage.moved(weight.detach()))


def _span(shard: Shard, parameter: nn.Parameter, precision: Precision) -> Tensor:
    """Return a span of a parameter: a view, or a copy if the parameter is cast, so that its memory can be freed."""
    span = shard.take(parameter.detach())
    return span.clone() if precision.is_half else span


def _in_master_dtype(weight: Tensor, precision: Precision) -> Tensor:
    return weight.to(dtype_of(precision.master)) if weight.dtype == torch.float32 else weight


def _in_dtype(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a gradient in a dtype; None if there is none."""
    return None if gradient is None else gradient.to(dtype)
