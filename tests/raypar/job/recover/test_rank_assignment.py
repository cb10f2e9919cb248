"""Who takes which rank when replicas are lost, or come back."""

from __future__ import annotations

import pytest

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.mesh.world import World
from raypar.job.recover.active_layout import rank_assignment

FOUR, TWO, PIPELINE, HALF = World(Mesh(dp=4)), World(Mesh(dp=2)), World(Mesh(pp=2, dp=4)), World(Mesh(pp=2, dp=2))
TENSOR, ONE = World(Mesh(dp=2, tp=2)), World(Mesh(tp=2))
SERVED, SERVED_ONE = World(Mesh(pp=2, dp=2), servers=1), World(Mesh(pp=2), servers=1)
EXPERTS, EXPERTS_ONE = World(Mesh(dp=2, expert_actors=2)), World(Mesh(expert_actors=2))

CASES = (
    ("replaced", TWO, TWO, [0], [2], [0, 2]),
    ("by a spare", FOUR, FOUR, [0, 2, 3], [4, 5], [0, 4, 2, 3]),
    ("two are left", FOUR, TWO, [0, 2], [], [0, 2]),
    ("of three, two go on", FOUR, TWO, [1, 2, 3], [], [1, 2]),
    ("whole replicas stay", PIPELINE, HALF, [0, 1, 2, 4, 6, 7], [], [0, 2, 4, 6]),
    ("a gap is filled by another replica's", PIPELINE, HALF, [0, 2, 3, 5, 6], [], [0, 2, 3, 6]),
    ("tensor groups stay together", TENSOR, ONE, [0, 2, 3], [], [2, 3]),
    ("a lost server's role is taken", SERVED, SERVED_ONE, [0, 1, 2, 3, 5], [], [0, 2, 1, 5]),
    ("expert actors stay", EXPERTS, EXPERTS_ONE, [1, 2, 3], [], [1, 2, 3]),
    ("replicas come back", TWO, FOUR, [0, 1], [2, 3], [0, 1, 2, 3]),
    ("a pipeline comes back", HALF, PIPELINE, [0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 4, 5, 2, 3, 6, 7]),
)


@pytest.mark.parametrize(
    ("before", "after", "present", "others", "seats"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_who_can_stay_stays_and_gaps_are_filled(before, after, present, others, seats):
    assert rank_assignment(before, after, present, others) == seats
