"""Look at the first batch of the user's own data for a GPT or Llama, before actors start. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from raypar.actors.data.batches import function_source
from raypar.actors.models.base import IGNORED
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import Transformer
from raypar.actors.specs.run import Run


def token_faults(run: Run) -> list[str]:
    """Return why a GPT or Llama can't take the first batch, or compute its loss; [] if the batch can't be made here.

    Args:
        run: The run, checked, whose data no actor gets.
    """
    if not isinstance(run.data, Batches) or not isinstance(run.model, Transformer):
        return []
    try:
        source = function_source(run.data)
        inputs, targets = source.inputs("train", 0, 0, 0), source.targets("train", 0, 0, 0)
    except Exception:  # its files may be where only the actors are
        return []
    kind = type(run.model).__name__
    if len(inputs) != 1 or len(targets) != 1:
        return [
            f"data.fn gives {len(inputs)} inputs and {len(targets)} targets, and a {kind} takes one of each: token ids "
            "and labels, both (samples, tokens)"
        ]
    return [*_input_faults(inputs[0], run.model, kind), *_label_faults(targets[0], inputs[0], run.model)]


def _input_faults(ids: Tensor, model: Transformer, kind: str) -> Iterator[str]:
    """Yield what is wrong with the token ids; the check of the run has looked at their dtype and length."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < model.vocab:
        yield (
            f"data.fn gives token ids from {int(ids.min())} to {int(ids.max())}, and model.vocab is {model.vocab}: ids "
            f"are 0 to {model.vocab - 1}, so give others, or a larger model.vocab"
        )
    if ids.dim() != 2:
        yield f"data.fn gives inputs {tuple(ids.shape)}, and a {kind} takes (samples, tokens)"


def _label_faults(labels: Tensor, ids: Tensor, model: Transformer) -> Iterator[str]:
    """Yield what is wrong with the labels."""
    if labels.dtype != torch.int64:
        yield f"data.fn gives targets of {_name(labels)}: labels are token ids, cast them with .long()"
    else:
        counted = labels[labels != IGNORED]
        if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < model.vocab:
            yield (
                f"data.fn gives labels from {int(counted.min())} to {int(counted.max())}, and model.vocab is "
                f"{model.vocab}: labels are 0 to {model.vocab - 1}, or {IGNORED} for a token that does not count"
            )
    if labels.shape != ids.shape:
        yield (
            f"data.fn gives targets {tuple(labels.shape)} for inputs {tuple(ids.shape)}: give a label for each token, "
            f"the next one, and {IGNORED} where there is none"
        )


def _name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
