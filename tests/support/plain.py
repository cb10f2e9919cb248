"""What one plain process computes, once for all layouts of a run: it is told nothing of a layout."""

from __future__ import annotations

from functools import cache

import raypar as rp
from raypar.parity.verify import train_plainly

_TOLD = ("model", "microbatches", "micro_batch_size", "data", "optim", "clip", "seed", "steps", "threads")
_once = cache(train_plainly)
_once_with_own_dice = cache(train_plainly)


def trained(run):
    return _once(_untold(run))


def trained_with_own_dice(run):
    """The same where each thread draws its dropout from a generator of its own."""
    return _once_with_own_dice(_untold(run))


def _untold(run):
    return rp.Run(mesh=rp.Mesh(dp=run.mesh.dp), **{name: getattr(run, name) for name in _TOLD})
