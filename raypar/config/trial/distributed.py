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

from raypar.actors.models.own.synced_batch_norm import SyncedBatchNorm
from raypar.actors.specs.run import Run

_FIX = "call rp.replicas.all_gather or all_reduce, or set mesh.dp to 1"


def shared_norm_faults(run: Run, layers: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield a fault for each module that should compute statistics over all replicas, and would not.

    Args:
        run: A run with several replicas.
        layers: Its layers, by name.
    """
    for layer, module in layers.items():
        for path, part in module.named_modules(prefix=layer):
            if not isinstance(part, nn.SyncBatchNorm):
                continue
            if not isinstance(part, SyncedBatchNorm):
                kind = type(part).__name__
                yield (
                    f"model.fn: {path} is a {kind}, a subclass of SyncBatchNorm, of which replicas do not share the "
                    "statistics: take nn.SyncBatchNorm, or call rp.replicas.all_reduce in its forward"
                )
            elif run.replica_fault is not None:
                fix = "or take nn.BatchNorm1d (2d, 3d), of each replica"
                yield f"model.fn: {path} is a SyncBatchNorm, and {run.replica_fault}; {fix}"


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
