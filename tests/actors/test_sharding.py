"""Which part of a dim is here: parts of parts are parts."""

from __future__ import annotations

import pytest
import torch

from raypar.actors.sharding import Pieces, Shard, Sharding, join_shards

ZIGZAG = Pieces(4, (0, 3))


@pytest.mark.parametrize("outer", [Pieces(), Pieces.at(1, 2), ZIGZAG, Pieces(2, (1, 0))], ids=str)
@pytest.mark.parametrize("inner", [Pieces(), Pieces.at(0, 2), Pieces.at(3, 4), Pieces(2, (1, 0))], ids=str)
def test_a_part_of_a_part_is_a_part_of_the_whole(outer, inner):
    whole = torch.arange(96).view(2, 48)
    part = outer.then(inner)
    assert torch.equal(part.take(whole, 1), inner.take(outer.take(whole, 1), 1))
    assert part.whole_length(part.take(whole, 1).shape[1]) == 48


def test_a_zigzag_takes_the_first_piece_and_the_last():
    assert ZIGZAG.take(torch.arange(8), 0).tolist() == [0, 1, 6, 7]


def test_pieces_are_no_finer_than_needed():
    """Of 8 tokens 4 members of each of 2 have one."""
    parts = [ZIGZAG.then(Pieces.at(rank, 4)).take(torch.arange(8), 0).tolist() for rank in range(4)]
    assert parts == [[0], [1], [6], [7]]
    assert ZIGZAG.then(Pieces.at(1, 2)) == Pieces(4, (3,))


@pytest.mark.parametrize("length", [4, 7, 9])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_uneven_pieces_make_up_the_dim_the_longer_ones_first(length, count):
    whole = torch.arange(2 * length).view(2, length)
    parts = [Pieces.at(rank, count).take(whole, -1) for rank in range(count)]
    assert torch.equal(torch.cat(parts, -1), whole)
    sizes = [part.shape[1] for part in parts]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    assert all(part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for part in parts), "views"


def test_pieces_that_are_not_adjacent_are_no_slice():
    assert Pieces(5, (2, 3)).span(5) == (2, 4)
    with pytest.raises(ValueError, match=r"pieces \(0, 3\) of 4 are not one slice"):
        ZIGZAG.span(8)


def test_a_sharding_composes_dim_by_dim():
    whole = torch.arange(64).view(4, 4, 4)
    outer, inner = Sharding({1: ZIGZAG}), Sharding({1: Pieces.at(1, 2), 2: Pieces.at(0, 4)})
    both = outer.then(inner)
    assert torch.equal(both.take(whole), inner.take(outer.take(whole)))
    assert both.whole_shape(both.take(whole).shape) == (4, 4, 4)
    assert Sharding({-1: ZIGZAG, 0: ZIGZAG}).for_dims(3) == Sharding({2: ZIGZAG, 0: ZIGZAG})
    assert Sharding({-1: ZIGZAG}).for_dims(0) == Sharding()


def test_shards_join_to_the_whole():
    whole = torch.arange(35).view(7, 5)
    shards = [Shard((7, 5), Sharding({0: Pieces.at(i, 2), 1: Pieces.at(j, 3)})) for i in range(2) for j in range(3)]
    assert (shards[4].offset, shards[4].shape, shards[4].is_whole) == ((4, 2), (3, 2), False)
    assert torch.equal(join_shards(shards, [shard.take(whole) for shard in shards]), whole)
    assert join_shards([Shard((7, 5))] * 2, [whole, whole]) is whole
