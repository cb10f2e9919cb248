"""Rules of data: they must fit the model, and a layout must be able to mask packed examples."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from raypar.actors.data.examples.example_batches import example_faults
from raypar.actors.data.examples.example_sets import are_converted
from raypar.actors.data.text.text_files import is_converted
from raypar.actors.data.text.token_batches import text_faults as text_faults
from raypar.actors.specs.data import Batches, Examples
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.config.conflicts.named_settings import GRID, OWN_LAYERS
from raypar.config.rules import Conflict, Examined, RunRule, RunSetting


def data_faults(examined: Examined) -> Iterator[str]:
    """Yield the faults of the data. A size of the model that is itself wrong is not compared with the data.

    Args:
        examined: The run.
    """
    run = examined.run
    examined.demand("data")
    if isinstance(run.data, Batches):
        from raypar.config.conflicts.batches import batches_faults, length_faults  # imports torch

        yield from batches_faults(run.data)
        yield from length_faults(examined, run.data)
        return
    seq, folder = examined.sound("model.seq", 1), examined.sound("model.hf", None)
    vocab = examined.sound("model.vocab", sys.maxsize)
    if seq is None:
        fix = "give Layers(seq=..., vocab=...), or data=Batches(fn)"
        yield f"data is text, but the model has no sequence length: {fix}"
        return
    found: Iterable[str] = ()
    if isinstance(run.data, Examples):
        if examined.converts or are_converted(run.data):
            found = example_faults(run.data, seq, vocab, folder)
    elif examined.converts or is_converted(run.data):
        found = text_faults(run.data, seq, vocab, folder)
    yield from (f"data.{fault}" for fault in found)


def _counts_from(run: Run) -> bool:
    """Return whether positions count from the beginning of a sequence, and not from that of an example."""
    return not isinstance(run.model, Layers) and run.model.positions not in ("rope", "alibi")


_APART = "set data.packing to False, which gives each example a sequence of its own"
_COUNT = "positions {run.model.positions!r} count from the sequence's beginning"
_LENGTHS = RunSetting("data.lengths", said="data.lengths is given")
_PACKING = RunSetting("data.packing", undo=_APART)
_WITH_CP = RunSetting("run", lambda run: run.mesh.cp > 1 and _counts_from(run), f"with mesh.cp {_COUNT}")
_ALONG = RunSetting("run", lambda run: run.sequence_parallel and _counts_from(run), f"with sequence_parallel {_COUNT}")
DATA_RULES: tuple[RunRule, ...] = (
    Conflict(_PACKING, OWN_LAYERS, "but layers of your own do not know where examples begin", _APART),
    Conflict(_PACKING, GRID, "but on grids ({other}) attention does not know where examples begin", _APART),
    Conflict(_PACKING, _WITH_CP, fix=_APART),
    Conflict(_PACKING, _ALONG, fix=_APART),
    Conflict(_LENGTHS, OWN_LAYERS, "but only experts of GPT and Llama read it, and model is Layers"),
    data_faults,
)
