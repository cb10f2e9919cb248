"""Which part of a dim, and which span of a part, an actor has: parts of parts are parts."""

from __future__ import annotations

import math
from itertools import permutations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypar.actors.sharding import (
    ElementCut,
    Pieces,
    Shard,
    Sharding,
    block_of,
    first_ranks,
    join_shards,
    num_blocks,
)
from tests.support.spans import cut_spans

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


# --- spans of replicas -----------------------------------------------------------------------------------------------


@given(
    elements=st.integers(0, 300) | st.integers(65_000, 70_000) | st.integers(0, 10**12),
    size=st.integers(1, 9) | st.integers(500, 520),
    data=st.data(),
)
def test_spans_tile_a_tensor_in_whole_blocks_and_differ_by_one_block(elements, size, data):
    first = data.draw(st.integers(0, size - 1))
    spans = cut_spans(elements, size, first)
    block = 64 if elements < 65_536 else 1024
    held = [span for span in spans[first:] + spans[:first] if span[0] < span[1]]
    assert [start for start, _ in held] == [0, *(stop for _, stop in held)][: len(held)], "from the first rank on"
    assert (held[-1][1] if held else 0) == elements, "they end at the end"
    assert all(start % block == 0 for start, _ in held), "blocks are whole"
    counts = [-(-(stop - start) // block) for start, stop in spans]
    assert max(counts) - min(counts) <= 1
    assert all(span == (0, 0) for span in spans if span not in held), "who holds nothing"
    assert len(held) == min(size, -(-elements // block)), "more ranks than blocks: some hold nothing"


def test_a_small_tensor_has_small_blocks():
    assert (block_of(0), block_of(65_535), block_of(65_536)) == (64, 64, 1024)
    assert (num_blocks(0), num_blocks(1), num_blocks(65), num_blocks(65_537)) == (0, 1, 2, 65)
    assert cut_spans(200, 3, 1) == ((192, 200), (0, 128), (128, 192))
    assert cut_spans(1, 4, 2) == ((0, 0), (0, 0), (0, 1), (0, 0)), "a scalar"
    assert cut_spans(0, 2, 1) == ((0, 0), (0, 0)), "a tensor without elements"


def gpt(width, layers, vocabulary, context):
    """The elements of the weights of a GPT-2."""
    layer = [width, width, 3 * width**2, 3 * width, width**2, *[width] * 3]
    layer += [4 * width**2, 4 * width, 4 * width**2, width]
    return [vocabulary * width, context * width, *layer * layers, width, width]


@pytest.mark.parametrize(
    ("elements", "size", "most"),
    [
        *[(gpt(1600, 48, 50_257, 1024), size, 1.0002) for size in (2, 3, 8, 64)],
        (gpt(1600, 48, 50_257, 1024), 512, 1.0003),
        (gpt(1600, 48, 50_257, 1024), 4096, 1.003),
        *[(gpt(128, 4, 512, 64), size, 1.004) for size in (2, 3, 4)],
        *[(gpt(16, 4, 11, 8), size, 1.08) for size in (2, 3, 4)],
        *[([8 * 4096] * 256, size, 1.0001) for size in (2, 8, 64, 512)],  # adapters of rank 8
        *[([512, 512 * 2048 // 8, 2048 // 8] * 512, size, 1.0005) for size in (2, 3, 8, 64)],  # slices of experts
        ([512, 512 * 2048 // 8, 2048 // 8] * 512, 512, 1.005),
    ],
    ids=str,
)
def test_the_fullest_rank_has_hardly_more_than_the_mean(elements, size, most):
    """Surplus blocks go round, so they do not add up on one rank."""
    sizes = dict(enumerate(elements))
    firsts = first_ranks(sizes, size)
    held = [0] * size
    for name, count in sizes.items():
        for rank, (start, stop) in enumerate(cut_spans(count, size, firsts[name])):
            held[rank] += stop - start
    assert sum(held) == sum(elements)
    assert max(held) <= most * sum(held) / size


@given(st.lists(st.integers(0, 700), min_size=1, max_size=8), st.integers(1, 5), st.integers(1, 4))
def test_copies_divide_the_spans_of_one_copy_and_none_has_two_blocks_more_than_another(counts, size, copies):
    sizes = dict(enumerate(counts))
    firsts, blocks = first_ranks(sizes, size * copies), [0] * (size * copies)
    plain = first_ranks(sizes, size)
    for name, count in sizes.items():
        cut = ElementCut(64, firsts[name], size, copies)
        assert cut.of_one_copy == ElementCut(64, plain[name], size)
        for own in range(size):
            held = cut.of_one_copy.span(count, own)
            spans = sorted(span for copy in range(copies) if (span := cut.span(count, copy * size + own)) is not None)
            assert bool(spans) == (held is not None)
            if held is not None:
                assert [held[0], *(stop for _, stop in spans)] == [*(start for start, _ in spans), held[1]]
        for rank in range(cut.num_ranks):
            start, stop = cut.span(count, rank) or (0, 0)
            assert start % 64 == 0
            blocks[rank] += num_blocks(stop - start)
    assert max(blocks) - min(blocks) <= 1


@given(st.integers(0, 700), st.integers(1, 5), st.integers(1, 4), st.data())
def test_the_ranks_that_have_elements_of_a_span_are_found(count, size, copies, data):
    cut = ElementCut(64, data.draw(st.integers(0, size * copies - 1)), size, copies)
    start = data.draw(st.integers(0, count))
    span = start, data.draw(st.integers(start, count))
    spans = {rank: own for rank in range(cut.num_ranks) if (own := cut.span(count, rank)) is not None}
    ranks = sorted(spans, key=spans.get)
    if start < span[1]:
        having = [rank for rank in ranks if max(start, spans[rank][0]) < min(span[1], spans[rank][1])]
        assert list(cut.ranks(count, span)) == having
    assert list(cut.ranks(count, (0, 0))) == ranks[:1]


def test_a_tensor_begins_where_the_blocks_before_it_end():
    sizes = {"a": 4 * 64, "b": 1, "empty": 0, "c": 7 * 64 - 1, "d": 64}
    assert first_ranks(sizes, 3) == {"a": 0, "b": 1, "empty": 2, "c": 2, "d": 0}
    assert first_ranks({"a": 300, "b": 1}, 1) == {"a": 0, "b": 0}


def test_small_blocks_and_large_ones_go_round_by_themselves():
    sizes = {"large": 65 * 1024, "small": 64, "next": 65 * 1024, "other": 64, "last": 64}
    assert first_ranks(sizes, 4) == {"large": 0, "small": 0, "next": 1, "other": 1, "last": 2}


@st.composite
def shards(draw):
    """A shard of a tensor of up to four dims, with or without a tensor group and another memory order."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    dims = {}
    for dim in range(len(shape)):
        count = draw(st.integers(1, 3))
        if count > 1:
            dims[dim] = Pieces.at(draw(st.integers(0, count - 1)), count)
    order = draw(st.none() | st.sampled_from([*permutations(range(len(shape)))]))
    part = math.prod(Shard(shape, Sharding(dims)).shape)
    start = draw(st.integers(0, part))
    return Shard(shape, Sharding(dims), (start, draw(st.integers(start, part))), order)


def flattened(shard, whole):
    """The elements of the slices in memory order."""
    return shard.sharding.take(whole).permute(shard.order or [*range(whole.dim())]).flatten()


@given(shard=shards(), data=st.data())
def test_a_span_is_taken_in_memory_order_and_put_back(shard, data):
    strides = data.draw(st.permutations(range(len(shard.whole))))
    inverse = sorted(range(len(strides)), key=strides.__getitem__)
    values = torch.arange(math.prod(shard.whole)).view(shard.whole)
    whole = values.permute(strides).contiguous().permute(inverse)  # any strides
    start, stop = shard.elements
    taken = shard.take(whole)
    assert torch.equal(taken, flattened(shard, whole)[start:stop])
    other = torch.full_like(whole, -1)
    shard.put(other, taken)
    assert torch.equal(shard.take(other), taken)
    assert (other != -1).sum() == stop - start, "nothing else changed"


@given(shard=shards())
def test_a_span_is_a_few_boxes_in_its_order(shard):
    whole = torch.arange(math.prod(shard.whole)).view(shard.whole)
    boxes = shard.boxes()
    assert len(boxes) <= max(1, 2 * len(shard.whole) - 1)
    order = shard.order or tuple(range(whole.dim()))
    pieces = [whole[tuple(slice(*span) for span in box)].permute(order).flatten() for box in boxes]
    assert all(piece.numel() for piece in pieces)
    assert torch.equal(torch.cat([*pieces, whole.new_empty(0)]), shard.take(whole))


def test_the_part_of_a_tensor_group_is_one_box():
    shard = Shard((7, 5), Sharding({0: Pieces.at(1, 2)}))
    assert shard.boxes() == [((4, 7), (0, 5))]
    assert Shard(()).boxes() == [()] == Shard((), elements=(0, 1)).boxes()
    assert Shard((), elements=(0, 0)).boxes() == []


def test_a_span_of_a_dense_part_is_a_view():
    whole = torch.zeros(4, 6)
    Shard((4, 6), elements=(5, 9)).take(whole).fill_(1)
    Shard((6, 4), elements=(9, 11), order=(1, 0)).take(whole.T).fill_(2)
    Shard((4, 6), Sharding({0: Pieces.at(1, 2)}), (0, 3)).take(whole).fill_(3)
    assert whole.flatten().tolist() == [0] * 5 + [1] * 4 + [2] * 2 + [0] + [3] * 3 + [0] * 9


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (20, 30), (300, 13), (257, 256)], ids=str)
def test_spans_of_slices_join_to_the_whole(shape, size):
    """Also if some ranks hold nothing; and a span is no whole tensor, even the span of one rank."""
    whole = torch.randn(shape)
    for across in [1, 3] if shape else [1]:
        held = []
        for column, rank in product(range(across), range(size)):
            sharding = Sharding({len(shape) - 1: Pieces.at(column, across)} if across > 1 else {})
            spans = cut_spans(math.prod(Shard(shape, sharding).shape), size, first=size - 1)
            held.append(Shard(shape, sharding, spans[rank]))
        assert not any(shard.is_whole for shard in held)
        joined = join_shards(held, [shard.take(whole).clone() for shard in held])
        assert torch.equal(joined, whole)
