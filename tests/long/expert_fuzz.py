"""Random layouts of experts on several actors, as threads: do they compute what one plain process computes?

    python -m tests.long.expert_fuzz [--number 200] [--seed 0]

Gates, capacities, losses, shared experts, ep, expert actors, shadows, rounds, etp, dp, cp, tp, pp, ZeRO and
recomputation are drawn, batches of one token too, and routers that send all tokens to one expert or two. Prints how
many were taken of each kind, and the first run that differs, with its diagnosis. Exit code 1 if there is one.
"""

from __future__ import annotations

import sys

from hypothesis import Phase

from raypar.actors.specs.worlds import world_of
from tests.support.expert_layouts import expert_layouts, tilted
from tests.support.fuzzing import fuzz
from tests.support.layouts import verdict_of

_OPTIONS = ("capacity", "shared", "residual", "noise", "bias_rate", "z_loss")
_AXES = ("ep", "expert_actors", "etp", "dp", "cp", "tp", "pp")


def kinds_of(run, tilt, verdict):
    """What a run is an example of."""
    moe, mesh = run.model.moe, run.mesh
    yield from (f"{axis}={getattr(mesh, axis)}" for axis in _AXES)
    yield from (f"gate {moe.gate}", f"top {moe.top_k}", f"{tilt} favoured", f"zero {world_of(run).zero}")
    yield f"{run.model.seq} tokens"
    yield from (name for name in _OPTIONS if getattr(moe, name))
    yield from ("shadows",) if run.expert_shadows else ()
    yield from (f"{run.expert_rounds} rounds",) if run.expert_rounds > 1 else ()
    yield from ("folded",) if mesh.folds_experts else ()
    yield f"recompute {run.recompute if isinstance(run.recompute, str) else 'by layer'}"
    yield "bitwise" if verdict.bitwise else "within bounds"


def compare(drawn):
    """Compare a run with one plain process, and return what it is an example of."""
    run, tilt = drawn
    with tilted(tilt):
        verdict = verdict_of(run)
    assert verdict.ok, f"{tilt}\n{verdict}"
    return kinds_of(run, tilt, verdict)


if __name__ == "__main__":
    sys.exit(fuzz(__doc__, expert_layouts(), compare, 200, [Phase.generate]))
