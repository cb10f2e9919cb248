"""Rules of thumb about pipelines and layouts: advice where one is broken."""

from __future__ import annotations

from collections.abc import Iterator

from raypar.planner.hardware.cluster import Cluster
from raypar.planner.search.ranking import Candidate

_MOST_BUBBLE = 0.1


def pipeline_advice(pp: int, microbatches: int, bubble: float, larger: str) -> Iterator[str]:
    """Yield the rules that a pipeline breaks.

    Args:
        pp: Its ranks.
        microbatches: Microbatches of a step.
        bubble: The part of a step in which it is empty.
        larger: What makes the bubble smaller, as 'more microbatches'.

    Source: Huang et al. 2019, "GPipe", section 3.2 (m at least 4 p).
    """
    if pp > microbatches:
        count = "1 microbatch is" if microbatches == 1 else f"{microbatches} microbatches are"
        yield f"{count} fewer than the {pp} pipeline ranks: give {larger}"
    elif pp > 1 and bubble > _MOST_BUBBLE:
        yield f"the bubble takes {bubble:.0%} of a step: {larger} would make it smaller"


def advice(one: Candidate, cluster: Cluster) -> Iterator[str]:
    """Yield the rules that a layout breaks, each with a fix.

    Args:
        one: The layout.
        cluster: Its cluster.

    Source: that of ``pipeline_advice``; Narayanan et al. 2021, takeaway 1 (tensor ranks inside of a node).
    """
    run, mesh = one.run, one.run.mesh
    yield from pipeline_advice(mesh.pp, run.microbatches, one.step.bubble / one.step.seconds, "a larger --batch")
    if mesh.tensor_ranks > cluster.each_node:
        yield f"tp {mesh.tensor_ranks} goes beyond a node of {cluster.each_node}: every layer waits for the network"
