"""Random layouts of small models, with threads as actors: do they compute what one plain process computes?

    python -m tests.long.layout_fuzz [--number 300] [--seed 0]

Prints how many were taken of each kind, and the smallest run that differs, with its diagnosis. Exit code 1 if there is
one.
"""

from __future__ import annotations

import sys

from raypar.actors.mesh.mesh import AXES
from raypar.actors.specs.worlds import world_of
from tests.support.fuzzing import fuzz
from tests.support.layouts import layouts, verdict_of


def kinds_of(run, verdict):
    """What a run is an example of."""
    yield from (f"{axis}={getattr(run.mesh, axis)}" for axis in AXES)
    yield from (run.schedule, run.model.kind, run.model.positions, run.data_parallel, run.optim.kind)
    if run.sequence_parallel:
        yield "sequence_parallel"
    world = world_of(run)
    if world.sharded:
        yield f"zero {world.zero}"
        yield from ("hybrid",) if world.hybrid else ()
    if world.gathers:
        yield f"gather {run.zero_gather}"
    yield from (name for name in ("dropout", "tied", "moe") if getattr(run.model, name))
    if run.tile != 1:
        yield "tiled"
    if run.offload != "none":
        yield f"offload {run.offload} to {'host memory' if run.offload_folder is None else 'files'}"
    yield f"recompute {run.recompute if isinstance(run.recompute, str) else 'by layer'}"
    yield "bitwise" if verdict.bitwise else "within bounds"


def compare(run):
    """Compare a run with one plain process, and return what it is an example of."""
    verdict = verdict_of(run)
    assert verdict.ok, str(verdict)
    return kinds_of(run, verdict)


if __name__ == "__main__":
    sys.exit(fuzz(__doc__, layouts(), compare, 300))
