"""Checkpoints on disk. Each is a folder with shards and a manifest, which exists completely or not at all."""

from __future__ import annotations

import warnings

from raypar.actors.errors import CheckpointError
from raypar.checkpoint.check import checkpoint_faults as verify
from raypar.checkpoint.check import verified
from raypar.checkpoint.find import Listed, VerifiedCheckpoint, ls, newest
from raypar.checkpoint.manifest import Manifest, manifest_of
from raypar.checkpoint.save import Save

__all__ = [
    "CheckpointError",
    "Listed",
    "Manifest",
    "Save",
    "VerifiedCheckpoint",
    "ls",
    "manifest_of",
    "newest",
    "verified",
    "verify",
]


def __getattr__(name: str) -> object:
    if name == "Found":
        warnings.warn("raypar.checkpoint.Found is VerifiedCheckpoint now", DeprecationWarning, stacklevel=2)
        return VerifiedCheckpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
