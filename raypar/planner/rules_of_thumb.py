"""Rules of thumb about pipelines and layouts: advice where one is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from raypar.actors.specs.model import Transformer
from raypar.planner.hardware.cluster import Cluster
from raypar.planner.search.ranking import Candidate
from raypar.planner.timing.step import StepModel, predicted

_MOST_BUBBLE = 0.1
_NOTICEABLE = 0.1  # part of a bubble by which a change must make it smaller to be advised


class Remedy(NamedTuple):
    """A change that may make a bubble smaller.

    Attributes:
        text: The change, as in "with 8 microbatches".
        bubble: Predicts the part of a step that is bubble after the change; None if the change is not possible.
    """

    text: str
    bubble: Callable[[], float | None]


def more_microbatches(pp: int, microbatches: int) -> int:
    """Return how many microbatches to compare with: twice as many, or so many times twice that there is one a rank."""
    more = 2 * microbatches
    while more < pp:
        more *= 2
    return more


def pipeline_advice(pp: int, microbatches: int, bubble: float, remedies: Sequence[Remedy]) -> Iterator[str]:
    """Yield the rule that a pipeline breaks, with the first remedy that makes its bubble noticeably smaller.

    Args:
        pp: Its ranks.
        microbatches: Microbatches of a step.
        bubble: The part of a step in which it is empty.
        remedies: What to try, in this order.

    Source: Huang et al. 2019, "GPipe", section 3.2 (m at least 4 p).
    """
    if pp == 1 or (pp <= microbatches and bubble <= _MOST_BUBBLE):
        return
    takes = f"the bubble takes {bubble:.0%} of a step"
    if pp > microbatches:
        count = "1 microbatch is" if microbatches == 1 else f"{microbatches} microbatches are"
        takes = f"{count} fewer than the {pp} pipeline ranks, and {takes}"
    for remedy in remedies:
        changed = remedy.bubble()
        if changed is not None and changed < (1 - _NOTICEABLE) * bubble:
            yield f"{takes}: {remedy.text} it would take {changed:.0%}"
            return


def advice(one: Candidate, cluster: Cluster) -> Iterator[str]:
    """Yield the rules that a layout breaks, each with a fix.

    Args:
        one: The layout.
        cluster: Its cluster.

    Source: that of ``pipeline_advice``; Narayanan et al. 2021, takeaway 1 (tensor ranks inside of a node).
    """
    run, mesh = one.run, one.run.mesh
    more = more_microbatches(mesh.pp, run.microbatches)
    assert isinstance(run.model, Transformer)
    paper = StepModel(replace(run, microbatches=more), run.model, cluster, one.order)

    def with_more() -> float:
        step = predicted(paper)
        return step.bubble / step.seconds

    batch = more * mesh.dp * run.micro_batch_size
    remedy = Remedy(f"with --batch {batch}", with_more)
    yield from pipeline_advice(mesh.pp, run.microbatches, one.step.bubble / one.step.seconds, [remedy])
    if mesh.tensor_ranks > cluster.each_node:
        yield f"tp {mesh.tensor_ranks} goes beyond a node of {cluster.each_node}: every layer waits for the network"
