"""Random layouts of experts on several actors, as threads: do they compute what one plain process computes?

    python -m tests.long.expert_fuzz [--number 200] [--seed 0]

Gates, capacities, losses, shared experts, ep, etp, dp, cp, tp, pp, ZeRO and recomputation are drawn, batches of one
token too, and routers that send all tokens to one expert or two. Prints how many were taken of each kind, and the
first run that differs, with its diagnosis. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from hypothesis import HealthCheck, Phase, given, seed, settings

from raypar.config.run import world_of
from tests.support.expert_layouts import expert_layouts, tilted
from tests.support.layouts import verdict_of

_OPTIONS = ("capacity", "shared", "residual", "noise", "bias_rate", "z_loss")
_AXES = ("ep", "etp", "dp", "cp", "tp", "pp")


def kinds_of(run, tilt, verdict):
    """What a run is an example of."""
    moe, mesh = run.model.moe, run.mesh
    yield from (f"{axis}={getattr(mesh, axis)}" for axis in _AXES)
    yield from (f"gate {moe.gate}", f"top {moe.top_k}", f"{tilt} favoured", f"zero {world_of(run).zero}")
    yield f"{run.model.seq} tokens"
    yield from (
        name for name in ("capacity", "shared", "residual", "noise", "bias_rate", "z_loss") if getattr(moe, name)
    )
    yield from ("shadows",) if run.expert_shadows else ()
    yield from ("folded",) if mesh.folds_experts else ()
    yield f"recompute {run.recompute if isinstance(run.recompute, str) else 'by layer'}"
    yield "bitwise" if verdict.bitwise else "within bounds"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    counts: Counter[str] = Counter()
    start = time.perf_counter()

    @seed(told.seed)
    @settings(
        max_examples=told.number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(expert_layouts())
    def compare(drawn):
        run, tilt = drawn
        with tilted(tilt):
            verdict = verdict_of(run)
        counts.update(kinds_of(run, tilt, verdict))
        assert verdict.ok, f"{tilt}\n{verdict}"

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
