"""Layers that torch's compiler compiles; if it fails, they run uncompiled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from raypar.actors.errors import first_line

log = logging.getLogger(__name__)


def compile_layers(modules: Sequence[nn.Module], backend: str = "inductor") -> None:
    """Compile layers with torch's compiler, in place. The compiler is imported here, which takes seconds.

    The first call of each layer compiles it. If that fails, the layer runs uncompiled, and one log line says why.

    Args:
        modules: The layers. Their names and parameters do not change.
        backend: The compiler's backend.
    """
    logged: set[str] = set()
    for module in modules:
        try:
            module.compile(backend=backend)
        except Exception as error:
            _log_once(logged, error)
        else:
            assert module._compiled_call_impl is not None
            module._compiled_call_impl = _CompiledCall(module, module._compiled_call_impl, logged)


class _CompiledCall:
    """A compiled call of a layer, which falls back to the uncompiled call if it fails.

    Args:
        module: The layer.
        compiled: Its compiled call.
        logged: The failures that this actor has logged.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any], logged: set[str]) -> None:
        self._module, self._compiled, self._logged = module, compiled, logged

    def __call__(self, *args: Any, **named: Any) -> Any:
        try:
            return self._compiled(*args, **named)
        except Exception as error:
            out = self._module._call_impl(*args, **named)  # raises the layer's own error, if it is one
            self._module._compiled_call_impl = None
            _log_once(self._logged, error)
            return out


def _log_once(logged: set[str], error: Exception) -> None:
    """Log a failure of the compiler, unless it is in ``logged``."""
    if (why := f"{type(error).__name__}: {first_line(error)}") not in logged:
        logged.add(why)
        log.warning("compile: layers are computed without torch's compiler, which failed (%s)", why)
