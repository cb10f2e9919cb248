"""Flags of another kind of model or optimizer than the run's, such as ``--model.mlp`` for a Llama."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from raypar.actors.known_fields import unknown_faults
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.optim import SGD, AdamW, Muon
from raypar.actors.specs.run import Run

_KINDS = {"model": (GPT, Llama), "optim": (AdamW, SGD, Muon)}


def foreign_faults(words: Sequence[str], run: Run) -> Iterator[str]:
    """Yield a fault for each flag that only another kind of model or optimizer has. The parser knows no such flags.

    Args:
        words: The words of a command line.
        run: The run that the flags change.
    """
    for word in words:
        flag = word.partition("=")[0]
        part, _, name = flag.removeprefix("--").replace("-", "_").partition(".")
        kinds = _KINDS.get(part, ()) if flag.startswith("--") else ()
        if any(name == field.name for kind in kinds for field in fields(kind)):
            for fault in unknown_faults(type(getattr(run, part)).__name__, [name]):
                yield f"{flag}: {fault}"
