"""Where batches come from: text files, or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Text:
    """Tokens of text files."""

    path: str = "stdlib"
    """file, folder or glob; stdlib: the .py files of Python's own library; .bin: uint16 tokens (nanoGPT's format)"""
    tokenizer: str | None = None
    """a Hugging Face ``tokenizers`` JSON file; None reads bytes (256 ids)"""
    val_path: str | None = None
    """validation text, same kinds as path; None keeps the last ``val_fraction`` of path for validation"""
    val_fraction: float = 0.1
    """share of the tokens that is kept for validation, 0 < val_fraction < 1"""
    cache: str | None = None
    """folder for the converted tokens; None is ~/.cache/raypar"""


@dataclass(frozen=True)
class Batches:
    """The user's own data: ``fn(step, microbatch, dp)`` returns ``(inputs, targets)``, a microbatch of replica ``dp``.

    A pure function: inputs and targets are asked for by different actors, which have to get the same batch. How many
    samples it has is up to it; a run's ``micro_batch_size`` does not count.
    """

    fn: Callable[[int, int, int], tuple[Any, Any]]
    """training batches; inputs and targets are tensors (or tuples of them) of one fixed shape"""
    validate: Callable[[int, int, int], tuple[Any, Any]] | None = None
    """the same for evaluation; None means that the run has no validation data"""
