"""Random layouts of small models, with threads as actors: do they compute what one plain process computes?

    python -m tests.long.layout_fuzz [--number 300] [--seed 0]

Prints how many were taken of each kind, and the smallest run that differs, with its diagnosis. Exit code 1 if there is
one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from hypothesis import HealthCheck, given, seed, settings

from raypar.actors.mesh.mesh import AXES
from raypar.config.run import world_of
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
    yield from (name for name in ("dropout", "tied") if getattr(run.model, name))
    if run.tile != 1:
        yield "tiled"
    if run.offload != "none":
        yield f"offload {run.offload} to {'host memory' if run.offload_folder is None else 'files'}"
    yield f"recompute {run.recompute if isinstance(run.recompute, str) else 'by layer'}"
    yield "bitwise" if verdict.bitwise else "within bounds"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    counts: Counter[str] = Counter()
    start = time.perf_counter()

    @seed(told.seed)
    @settings(max_examples=told.number, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(layouts())
    def compare(run):
        verdict = verdict_of(run)
        counts.update(kinds_of(run, verdict))
        assert verdict.ok, str(verdict)

    try:
        compare()
    except AssertionError as error:
        print(error, *error.__notes__, sep="\n")
        return 1
    finally:
        print(", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())))
        print(f"{time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
