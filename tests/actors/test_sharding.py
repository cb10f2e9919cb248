"""Which part of a dim is here: parts of parts are parts."""

from __future__ import annotations

import pytest
import torch

from raypar.actors.sharding import Portion

ZIGZAG = Portion(4, (0, 3))


@pytest.mark.parametrize("outer", [Portion(), Portion.at(1, 2), ZIGZAG, Portion(2, (1, 0))], ids=str)
@pytest.mark.parametrize("inner", [Portion(), Portion.at(0, 2), Portion.at(3, 4), Portion(2, (1, 0))], ids=str)
def test_a_part_of_a_part_is_a_part_of_the_whole(outer, inner):
    whole = torch.arange(96).view(2, 48)
    part = outer.then(inner)
    assert torch.equal(part.take(whole, 1), inner.take(outer.take(whole, 1), 1))
    assert part.whole(part.take(whole, 1).shape[1]) == 48


def test_a_zigzag_takes_the_first_piece_and_the_last():
    assert ZIGZAG.take(torch.arange(8), 0).tolist() == [0, 1, 6, 7]


def test_pieces_are_no_finer_than_needed():
    """Of 8 tokens 4 members of each of 2 have one."""
    parts = [ZIGZAG.then(Portion.at(rank, 4)).take(torch.arange(8), 0).tolist() for rank in range(4)]
    assert parts == [[0], [1], [6], [7]]
    assert ZIGZAG.then(Portion.at(1, 2)) == Portion(4, (3,))
