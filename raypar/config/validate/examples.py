"""Check that a layout can keep the examples apart that share a sequence."""

from __future__ import annotations

from collections.abc import Iterator

from raypar.actors.specs.data import Examples
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run


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
