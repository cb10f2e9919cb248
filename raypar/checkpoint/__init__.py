"""Checkpoints on disk. Each is a folder with shards and a manifest, which exists completely or not at all."""

from __future__ import annotations

from raypar.actors.errors import CheckpointError
from raypar.checkpoint.check import verified, verify
from raypar.checkpoint.find import Listed, ls, newest
from raypar.checkpoint.manifest import Manifest, manifest_of
from raypar.checkpoint.save import Save

__all__ = [
    "CheckpointError",
    "Found",
    "Listed",
    "Manifest",
    "Save",
    "ls",
    "manifest_of",
    "newest",
    "verified",
    "verify",
]
