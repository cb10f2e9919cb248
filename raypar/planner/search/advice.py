"""Rules of thumb about a layout, where it breaks one."""

from __future__ import annotations

from collections.abc import Iterator

from raypar.planner.hardware.cluster import Cluster
from raypar.planner.rules_of_thumb import pipeline_advice
from raypar.planner.search.ranking import Candidate


def advice(one: Candidate, cluster: Cluster) -> Iterator[str]:
    """Yield the rules that a layout breaks, and what would mend it.

    Args:
        one: The layout.
        cluster: Its cluster.

    Source: that of ``pipeline_advice``; Narayanan et al. 2021, takeaway 1 (tensor ranks inside of a node).
    """
    run, mesh = one.run, one.run.mesh
    yield from pipeline_advice(mesh.pp, run.microbatches, one.step.bubble / one.step.seconds, "a larger --batch")
    if mesh.tensor_ranks > cluster.each_node:
        yield f"tp {mesh.tensor_ranks} goes beyond a node of {cluster.each_node}: every layer waits for the network"
