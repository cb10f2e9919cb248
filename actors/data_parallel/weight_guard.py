"""Refuse ops that read a sharded weight while it is not whole, or that write into one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from raypar.actors.autograd.torch_private import DispatchMode, argument_names, leaves_of, written_arguments
from raypar.actors.data_parallel.units import Unit

_ONLY_THERE = "with zero 3 the weights of a layer are there only while the layer runs"


class WeightGuard(DispatchMode):
    """Mode in which an op that reads a freed weight, or writes into a whole one, raises ValueError.

    Args:
        units: The units of the weights.
    """

    only_looks = True

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__()
        self._units, self._is_off = units, False

    @contextmanager
    def off(self) -> Iterator[None]:
        """Return a context in which nothing is checked, because weights are being gathered or freed."""
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_off and not getattr(func, "is_view", True):
            values = dict(zip(argument_names(func), args, strict=False)) | kwargs
            written = {name: values.pop(name) for name in written_arguments(func) if name in values}
            for tensor in leaves_of((values, written)):
                if isinstance(tensor, Tensor):
                    self._demand_whole(tensor)
            for tensor in leaves_of(written):
                if isinstance(tensor, Tensor) and (name := self._name_of(tensor)[0]) is not None:
                    raise ValueError(
                        f"{name} is written to, and {_ONLY_THERE}, so the change would be lost: let the forward "
                        "compute with a changed copy, keep the value in a buffer, or set zero to 2"
                    )
        return func(*args, **kwargs)

    def _demand_whole(self, tensor: Tensor) -> None:
        name, unit = self._name_of(tensor)
        if unit is not None and not unit.is_ready:
            raise ValueError(
                f"{name} is used while it is not there: {_ONLY_THERE}. Hand what a layer makes to later layers as its "
                "outputs only, and register a weight in every layer that uses it; or keep weights until the backward, "
                "reshard_after_forward=False, or set zero to 2"
            )

    def _name_of(self, tensor: Tensor) -> tuple[str | None, Unit | None]:
        """Return the logical name and the unit of the weight that a tensor has the memory of; None if of none."""
        for unit in self._units:
            if (name := unit.name_of(tensor)) is not None:
                return name, unit
        return None, None
