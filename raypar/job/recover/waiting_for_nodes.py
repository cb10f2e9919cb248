"""Nodes for actors that replace lost ones: the wait for them, and the error if none comes."""

from __future__ import annotations

import logging

from raypar.actors.specs.run import Run
from raypar.cluster.interrupts import impatience
from raypar.cluster.lifecycle.actors import Actors
from raypar.cluster.lifecycle.ray_cluster import free_cpus_text
from raypar.errors import NoRoomError
from raypar.job.layout.elastic import Layout, Layouts

log = logging.getLogger(__name__)


def room_awaited(actors: Actors, layouts: Layouts, who: str) -> Layout | None:
    """Wait for nodes with room for actors without which a run can't go on, as long as the launch said (wait_for_nodes).

    A Ctrl-C or SIGTERM ends the wait, and with it the job.

    Args:
        actors: The job's actors.
        layouts: The layouts in which the run can go on.
        who: The actors that are lost.

    Returns:
        The layout with the most replicas for which there are enough actors; None if there is none.
    """
    wait, layout = actors.wait_for_nodes, None
    if actors.hoped(wait):
        log.warning("%s: the run waits up to %g s in all for room for %s", why_no_room(actors), wait, who)
    with impatience():
        while layout is None and actors.wait_for(actors.present + 1, wait):
            layout = layouts.largest(actors.present)
    return layout


def why_no_room(actors: Actors) -> str:
    """Return the reason why no other actor starts."""
    if any(one.has_room for one in actors.pending):
        return "no other actor starts"
    free = free_cpus_text()
    return f"no node has room for another actor ({free})" if free else "no node is left for another actor"


def no_room_error(actors: Actors, layouts: Layouts, who: str) -> NoRoomError:
    """Return the error of a run for which no other actors come, with what would have helped.

    Args:
        actors: The job's actors.
        layouts: The layouts in which the run can go on.
        who: The actors that are lost.
    """
    error = NoRoomError(f"{why_no_room(actors)} in the place of {who}, and {layouts.why_none()}")
    error.add_note(_what_helps(layouts.whole.run, actors.wait_for_nodes))
    return error


def _what_helps(run: Run, waited: float) -> str:
    """Return advice on options with which a run survives the loss of nodes, or loses less by it."""
    text = f"Where nodes come back, wait_for_nodes (--wait-for-nodes), which was {waited:g} s, lets a run wait for them"
    if run.folder is None:
        text += "; in a folder (--folder) it is saved, also at its end, from what is left in memory"
    elif not run.save_every:
        text += "; save_every (--save-every) keeps checkpoints on the disk, whatever is lost"
    return f"{text}."
