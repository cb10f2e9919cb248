"""Tied weights on several ranks: which members exchange gradients."""

from __future__ import annotations

import pytest

from raypar.actors.models.tied_weights import Ends


@pytest.mark.parametrize(
    ("homes", "copies", "pairs"),
    [
        ((0,), (1,), {(0, 1)}),
        ((0, 1, 2), (3, 4), {(0, 3), (1, 4), (2, 3)}),
        ((0, 1), (2, 3, 4, 5), {(0, 2), (1, 3), (0, 4), (1, 5)}),
    ],
)
def test_every_member_has_a_partner_at_the_other_end_and_the_first_ones_several(homes, copies, pairs):
    ends = Ends("embed.weight", homes, "head.weight", copies)
    assert ends.pairs == pairs
    assert [ends.reversed().original_for(place) for place in range(len(homes))] == [
        copies[i % len(copies)] for i in range(len(homes))
    ]
    assert [ends.original_for(place) for place in range(len(copies))] == [
        homes[i % len(homes)] for i in range(len(copies))
    ]
