"""Rules of thumb about a layout, where it breaks one."""

from __future__ import annotations

from collections.abc import Iterator

from raypar.planner.hardware.cluster import Cluster
from raypar.planner.search.ranking import Candidate

_MOST_BUBBLE = 0.1


def advice(one: Candidate, cluster: Cluster) -> Iterator[str]:
    """Yield the rules that a layout breaks, and what would mend it.

    Args:
        one: The layout.
        cluster: Its cluster.

    Source: Huang et al. 2019, "GPipe", section 3.2 (m at least 4 p); Narayanan et al. 2021, takeaway 1 (tensor ranks
    inside of a node).
    """
    run, mesh = one.run, one.run.mesh
    if mesh.pp > run.microbatches:
        yield f"{run.microbatches} microbatches are fewer than the {mesh.pp} pipeline ranks: give a larger --batch"
    elif (part := one.step.bubble / one.step.seconds) > _MOST_BUBBLE:
        yield f"the bubble takes {part:.0%} of a step: a larger --batch makes it smaller"
    if mesh.tensor_ranks > cluster.each_node:
        yield f"tp {mesh.tensor_ranks} goes beyond a node of {cluster.each_node}: every layer waits for the network"
