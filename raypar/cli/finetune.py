"""``raypar sft``: fine-tune a model of Hugging Face on examples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from raypar.cli.train import Finished, Plan, train
from raypar.config.finetuning import finetuning
from raypar.errors import ConfigError

_USAGE = "raypar sft EXAMPLES --model FOLDER"


def sft(words: Sequence[str], terminal: bool) -> Plan | Finished:
    """Run ``raypar sft``.

    Args:
        words: The words after ``sft``: the examples, ``--model`` with the folder, and flags of ``raypar train``.
        terminal: Whether to draw a dry run's schedule in colours.

    Raises:
        ConfigError: The words, the folder or the examples have faults; no actor was started.
        JobError: The run failed.
        NonFiniteError: The gradients became infinite or NaN.
    """
    left = list(words)
    if any(word.partition("=")[0] == "--resume" for word in left):
        raise ConfigError(["sft begins a run: go on with one by raypar train --resume RUN"])
    folder = _taken(left, "--model")
    path = left.pop(0) if left and not left[0].startswith("-") else None
    faults = [] if path is not None else [f"the examples are missing: {_USAGE}"]
    if folder is None:
        faults.append(f"--model is missing, the folder of a model of Hugging Face: {_USAGE}")
    if faults or path is None or folder is None:
        raise ConfigError(faults)
    full = [word.lower() for word in left]
    adapters = "--model.lora=none" not in full and ("--model.lora", "none") not in pairwise(full)
    return train(left, terminal, finetuning(path, folder, adapters=adapters))


def _taken(words: list[str], flag: str) -> str | None:
    """Remove a flag and its value from the words, and return the value; None if it is not there."""
    for at, word in enumerate(words):
        if word.startswith(f"{flag}="):
            return words.pop(at).partition("=")[2]
        if word == flag and at + 1 < len(words):
            words.pop(at)
            return words.pop(at)
    return None
