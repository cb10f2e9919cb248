"""Layers whose forwards and backwards torch's compiler makes; they are computed as they are where it can't."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from raypar.actors.errors import first_line

log = logging.getLogger(__name__)


def compile_layers(modules: Sequence[nn.Module], backend: str = "inductor") -> None:
    """Let torch's compiler make the calls of layers, in place. It is imported here, which takes seconds.

    The first call of each layer compiles it. If that fails, the layer is computed as it is, and one line says why.

    Args:
        modules: The layers. Their names and parameters stay.
        backend: The compiler's backend.
    """
    told: set[str] = set()
    for module in modules:
        try:
            module.compile(backend=backend)
        except Exception as error:
            _tell(told, error)
        else:
            assert module._compiled_call_impl is not None
            module._compiled_call_impl = _Tried(module, module._compiled_call_impl, told)


class _Tried:
    """A compiled call of a layer, and what takes its place if it fails.

    Args:
        module: The layer.
        compiled: Its compiled call.
        told: What was told of failures already, on this actor.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any], told: set[str]) -> None:
        self._module, self._compiled, self._told = module, compiled, told

    def __call__(self, *args: Any, **named: Any) -> Any:
        try:
            return self._compiled(*args, **named)
        except Exception as error:
            out = self._module._call_impl(*args, **named)  # raises the layer's own error, if it is one
            self._module._compiled_call_impl = None
            _tell(self._told, error)
            return out


def _tell(told: set[str], error: Exception) -> None:
    """Log a failure of the compiler, each but once."""
    if (why := f"{type(error).__name__}: {first_line(error)}") not in told:
        told.add(why)
        log.warning("compile: layers are computed without torch's compiler, which failed (%s)", why)
