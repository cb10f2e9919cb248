"""The data of a run: text files, or the user's own function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raypar.actors.known_fields import known_fields


@known_fields()
@dataclass(frozen=True)
class Text:
    """Data from text files: windows of tokens."""

    path: str = "stdlib"
    """file, folder or glob; stdlib: the .py files of Python's library; a .bin file has uint16 tokens (as nanoGPT's)"""
    tokenizer: str | None = None
    """a Hugging Face ``tokenizers`` JSON file; None reads bytes (256 ids)"""
    val_path: str | None = None
    """validation text, spelled like path; None takes the last ``val_fraction`` of path for validation"""
    val_fraction: float = 0.1
    """share of the tokens to keep for validation, between 0 and 1"""
    cache: str | None = None
    """folder for the converted tokens; None is ~/.cache/raypar"""


@known_fields()
@dataclass(frozen=True)
class Batches:
    """The user's own data: ``fn(step, microbatch, dp)`` returns ``(inputs, targets)``, a microbatch of replica ``dp``.

    The function must be pure: different actors call it for the inputs and for the targets of the same batch. It decides
    how many samples a microbatch has; the run's ``micro_batch_size`` is ignored.
    """

    fn: Callable[[int, int, int], tuple[Any, Any]]
    """training batches; inputs and targets are tensors (or tuples of tensors)"""
    validate: Callable[[int, int, int], tuple[Any, Any]] | None = None
    """validation batches; None if the run has no validation data"""
    varying: bool = False
    """whether shapes change between microbatches or steps, as in a curriculum of sequence lengths; stages then tell
    each other the shapes with every message"""
