"""Check the data of a run, and that they fit its model.

Check that a layout can keep the examples apart that share a sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from raypar.actors.data.example_batches import example_faults
from raypar.actors.data.example_sets import are_converted
from raypar.actors.data.text_files import is_converted
from raypar.actors.data.token_batches import text_faults as text_faults
from raypar.actors.specs.data import Batches, Examples
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.config.validate.model import length_faults

_UNREAD = "data.lengths is given, but only experts of GPT and Llama read it, and model is Layers: leave it out"


def packing_faults(run: Run) -> Iterator[str]:
    """Yield what keeps examples from sharing a sequence.

    Args:
        run: The run, whose mesh and model have no faults.
    """
    if not isinstance(run.data, Examples) or not run.data.packing:
        return
    fix = "use data.packing=False, which gives each example a sequence of its own"
    if isinstance(run.model, Layers):
        yield f"data.packing: layers of your own do not know where examples begin: {fix}"
        return
    if isinstance(run.mesh.tp, str):
        yield f"data.packing: on grids (mesh.tp {run.mesh.tp!r}) attention does not know where examples begin: {fix}"
    if run.model.positions not in ("rope", "alibi") and (run.mesh.cp > 1 or run.sequence_parallel):
        what = "mesh.cp" if run.mesh.cp > 1 else "sequence_parallel"
        yield f"data.packing: with {what} positions {run.model.positions!r} count from the sequence's beginning: {fix}"


def data_faults(run: Run, right: Callable[..., bool], *, converts: bool = True) -> list[str]:
    """Return the faults of the data. A size of the model that is itself wrong is not compared with the data.

    Args:
        run: The run.
        right: Returns whether some fields have their declared types and ranges.
        converts: Whether data that the cache has not are converted to look for faults in them.
    """
    if isinstance(run.data, Batches):
        from raypar.config.validate.batches import batches_faults  # imports torch

        lengths = length_faults(run, run.data, right) if right("model.seq") else ()
        unread = run.data.lengths is not None and isinstance(run.model, Layers)
        return [*batches_faults(run.data), *lengths, *([_UNREAD] if unread else ())]
    seq = run.model.seq if right("model.seq") else 1
    if seq is None:
        return [
            "data is text, but the model has no sequence length: give Layers(seq=..., vocab=...), or data=Batches(fn)"
        ]
    folder = run.model.hf if right("model.hf") else None
    vocab = run.model.vocab if right("model.vocab") else sys.maxsize
    if not converts and not (are_converted(run.data) if isinstance(run.data, Examples) else is_converted(run.data)):
        return [*packing_faults(run)] if isinstance(run.data, Examples) else []
    if isinstance(run.data, Examples):
        return [*packing_faults(run), *(f"data.{fault}" for fault in example_faults(run.data, seq, vocab, folder))]
    return [f"data.{fault}" for fault in text_faults(run.data, seq, vocab, folder)]
