"""Versions of a stage's weights: older ones that unfinished microbatches use while the optimizer updates the newest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from raypar.actors.models.init.deferred_init import as_kind_of
from raypar.actors.tensors import sum_dtype
from raypar.schedules.action import Action, Op
from raypar.schedules.versions import Versions

_Bank = list[Tensor]  # one version, in the order of the parameters


class WeightVersions:
    """The versions of one stage's weights that an asynchronous schedule keeps.

    The optimizer updates the stage's parameters in place. Forwards and backwards use other parameters instead, which
    share the memory of one version. Before an update, the parameters move to a copy of the newest version, if a
    microbatch still needs that one: so its graph never has weights that have changed. The gradients of all microbatches
    of a step are accumulated in the stage's parameters, whatever version each has.

    Args:
        modules: The stage's layers.
        row: The row of the stage's rank.
        stage: The stage's number.

    Source: Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", section 3.3.
    """

    def __init__(self, modules: Sequence[nn.Module], row: Sequence[Action], stage: int) -> None:
        self._row, self._stage = row, stage
        found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for part in (part for module in modules for part in module.modules()):
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    found.setdefault(parameter, []).append((part, name))
        self._slots = found
        self.begin(row)

    def begin(self, row: Sequence[Action]) -> None:
        """Begin a stream of steps, with the present weights as version 0.

        Args:
            row: The row that will be performed.
        """
        self._versions = Versions(row, self._stage)
        self._banks: dict[int, _Bank] = {}

    @property
    def kept(self) -> tuple[int, ...]:
        """The stored versions, the oldest first."""
        return self._versions.kept

    @property
    def older_bytes(self) -> int:
        """Bytes of the stored versions other than the newest one."""
        older = (bank for version, bank in self._banks.items() if version != self._versions.newest)
        return sum(weight.nbytes for bank in older for weight in bank)

    @contextmanager
    def using(self, action: Action) -> Iterator[None]:
        """Return a context in which the layers have a microbatch's version of their weights, for an action of it.

        Args:
            action: An F, B, I or W of the stage.
        """
        assert action.microbatch is not None
        version = self._versions.used[action.microbatch]
        bank, adds = self._bank(version), action.op is not Op.F
        for (parameter, slots), weight in zip(self._slots.items(), bank, strict=True):
            weight.grad = parameter.grad if adds else None
            _put(weight, slots)
        try:
            yield
        finally:
            for (parameter, slots), weight in zip(self._slots.items(), bank, strict=True):
                if adds:
                    parameter.grad, weight.grad = weight.grad, None
                _put(parameter, slots)
        self._perform(action)

    @contextmanager
    def updating(self, action: Action) -> Iterator[None]:
        """Return a context for the update of the stage's parameters, which creates the next version.

        Args:
            action: A STEP of the stage.
        """
        if self._versions.is_needed(newest := self._versions.newest):
            self._bank(newest)
            for parameter in self._slots:
                parameter.data = parameter.data.clone()
        yield
        self._perform(action)

    def _bank(self, version: int) -> _Bank:
        """Return the parameters of a stored version."""
        if version not in self._banks:
            assert version == self._versions.newest
            self._banks[version] = [_alias(parameter) for parameter in self._slots]
        return self._banks[version]

    def _perform(self, action: Action) -> None:
        self._versions.perform(action)
        kept = self._versions.kept
        self._banks = {version: bank for version, bank in self._banks.items() if version in kept}


def _alias(parameter: nn.Parameter) -> Tensor:
    """Return another parameter with the same memory and attributes.

    Writes to one don't count as writes to the other for autograd.
    """
    alias = as_kind_of(parameter, parameter.data)
    alias.grad_dtype = sum_dtype(parameter)
    return alias


def _put(weight: Tensor, slots: Sequence[tuple[nn.Module, str]]) -> None:
    for module, name in slots:
        module._parameters[name] = weight  # type: ignore[assignment]
