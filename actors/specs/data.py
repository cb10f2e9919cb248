"""The data of a run: text files, examples for fine-tuning, or the user's own function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from raypar.actors.bounds import Positive
from raypar.actors.known_fields import known_fields

Learned: TypeAlias = Literal["answers", "all"]


@known_fields()
@dataclass(frozen=True)
class Text:
    """Data from text files: windows of tokens."""

    path: str = "stdlib"
    """file, folder or glob; stdlib: the .py files of Python's library; a .bin file has uint16 tokens (as nanoGPT's)"""
    tokenizer: str | None = None
    """a Hugging Face ``tokenizers`` JSON file, or a folder with a tokenizer.json; None reads bytes (256 ids)"""
    val_path: str | None = None
    """validation text, spelled like path; None keeps ``val_fraction`` of path for validation"""
    val_fraction: float = 0.1
    """share of the tokens to keep for validation, between 0 and 1"""
    val_from: Literal["blocks", "end"] = field(default="blocks", kw_only=True)
    """which tokens these are: blocks: up to 100 blocks, drawn over all of the text; end: the last ones. A run that is
    resumed keeps what it began with"""
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
    """whether shapes change between microbatches or steps, as in a curriculum of sequence lengths; stages then send
    the shapes with every message"""
    lengths: Callable[[Any, Any], Any] | None = None
    """``lengths(inputs, targets)`` returns how many tokens each sequence has before its padding, (B,) int64: experts
    leave the padding out; None if nothing is padding"""


@known_fields()
@dataclass(frozen=True)
class Examples:
    """Data for fine-tuning: examples from files, in one of four shapes, packed into sequences.

    A line of a jsonl file is an example: ``{"text": ...}``, ``{"messages": [...]}``, or ``{"prompt": ..., "completion":
    ...}`` with texts or with messages. A message is ``{"role": ..., "content": ...}``.
    """

    path: str | Mapping[str, Positive] = field(hash=False)
    """file, folder or glob of .jsonl, .json, .parquet and .txt files, a file of which is one example; a folder of
    ``datasets.save_to_disk``; or several of these, each with the weight of its sequences in the mixture"""
    tokenizer: str | None = None
    """folder of a Hugging Face model, or its tokenizer.json; None reads bytes (256 ids)"""
    template: str | None = None
    """file with the chat template (Jinja), instead of the one in the tokenizer's folder"""
    learn: Learned = "answers"
    """which tokens are targets: answers, those of the assistant and of completions; or all"""
    packing: bool = True
    """whether several examples share a sequence, without seeing each other; else each has one of its own"""
    val_path: str | None = None
    """validation examples; None takes ``val_fraction`` of those in path"""
    val_fraction: float = 0.1
    """share of the examples to keep for validation, between 0 and 1"""
    cache: str | None = None
    """folder for the converted examples; None is ~/.cache/raypar"""
    kind: Literal["examples"] = field(default="examples", kw_only=True)
    """name of this kind of data in the file of a run"""
