"""Find layers and losses that use torch.distributed to share values with other processes. Imports torch.

Actors do not initialize torch.distributed, so code that checks ``is_initialized`` silently computes alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest.mock import patch

import torch.distributed
from torch import nn

_FIX = "a layer and a loss see one microbatch of one replica: compute within it, or set mesh.dp to 1"


def shared_norm_faults(layers: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield a fault for each module that computes statistics over all replicas.

    Args:
        layers: The layers of a run with several replicas, by name.
    """
    for layer, module in layers.items():
        for path, part in module.named_modules(prefix=layer):
            if isinstance(part, nn.SyncBatchNorm):
                says = (
                    f"model.fn: {path} is a SyncBatchNorm, but replicas do not share their statistics, and it would be"
                )
                yield f"{says} a BatchNorm of each: take nn.BatchNorm1d (2d, 3d), or set mesh.dp to 1"


@contextmanager
def noticed_questions() -> Iterator[list[str]]:
    """Record the calls of ``torch.distributed.is_initialized`` by the user's code while the context is open.

    Yields:
        The fault of each file and line that calls it.
    """
    asked, ask = list[str](), torch.distributed.is_initialized

    def is_initialized() -> bool:
        """Record the caller, and return what torch returns."""
        caller = sys._getframe(1)
        if not caller.f_globals.get("__name__", "").startswith(("torch.", "raypar.")):
            place = f"{caller.f_code.co_filename}, line {caller.f_lineno}"
            says = (
                f"torch.distributed is not initialized on actors, and {place} asks for it, so that it would go on alone"
            )
            asked.append(f"{says}: {_FIX}")
        return ask()

    with patch.object(torch.distributed, "is_initialized", is_initialized):
        yield asked
