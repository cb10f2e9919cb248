"""The layout of a flat tensor whose parameters replicas divide: every element has one holder, and every part flags."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypar.actors.data_parallel.cut_layout import CutLayout, ReplicaCut
from raypar.actors.sharding import Shard, block_of, num_blocks

SHAPES = st.lists(st.sampled_from([(), (0,), (1,), (63,), (64,), (65,), (7, 30), (3, 0, 2), (70_001,)]), min_size=1)


def layouts(shapes, size):
    tensors = {f"p{i}": torch.arange(torch.Size(shape).numel(), dtype=torch.float32) for i, shape in enumerate(shapes)}
    return tensors, [
        CutLayout(tensors, {f"p{i}": ReplicaCut(i % size, rank, size) for i in range(len(shapes))})
        for rank in range(size)
    ]


@given(SHAPES, st.integers(1, 7))
def test_every_element_has_one_holder_and_every_holder_a_flag(shapes, size):
    tensors, ranks = layouts(shapes, size)
    held = torch.zeros(ranks[0].size, dtype=torch.int64)
    for rank, layout in enumerate(ranks):
        assert (layout.cut, layout.summed, layout.starts) == (ranks[0].cut, ranks[0].summed, ranks[0].starts)
        for view in layout.summed.views(held, rank):
            view += 1
        assert layout.own_flags(torch.arange(layout.size)).numel() == len(layout.own)
        assert layout.summed_count == layout.count + len(layout.own)
        for name, (start, stop) in layout.own.items():
            block = block_of(tensors[name].numel())
            assert start % block == 0 and (stop % block == 0 or stop == tensors[name].numel())
    for name, tensor in tensors.items():
        start = ranks[0].starts[name]
        assert start % 64 == 0
        assert bool((held[start : start + tensor.numel()] == 1).all())
        held[start : start + tensor.numel()] = 0
        assert sum(name in layout.own for layout in ranks) == max(1, min(size, num_blocks(tensor.numel())))
    assert int(held[: ranks[0].elements].sum()) == 0, "what lies between tensors belongs to nobody"
    assert bool((held[ranks[0].elements :] == 1).all())


@given(SHAPES, st.integers(1, 7))
def test_a_part_is_the_same_in_the_flat_tensor_and_packed(shapes, size):
    tensors, ranks = layouts(shapes, size)
    flat = torch.full((ranks[0].size,), -1.0)
    for name, tensor in tensors.items():
        flat[ranks[0].starts[name] :][: tensor.numel()] = tensor
    for rank, layout in enumerate(ranks):
        packed = layout.summed.part(flat, rank)
        for name, (start, stop) in layout.own.items():
            assert torch.equal(layout.span(name, flat), tensors[name][start:stop])
            assert torch.equal(layout.part(name, packed), tensors[name][start:stop])
            assert layout.span(name, flat).untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert packed.numel() == layout.summed_count


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(()), torch.randn(9, 21), torch.randn(9, 21).T, torch.randn(16, 16)[::2, ::2], torch.randn(4, 0)],
    ids=["scalar", "rows", "columns", "gaps", "empty"],
)
def test_the_parts_of_a_parameter_are_in_its_memory_order(tensor):
    whole = torch.full_like(tensor, float("nan"))
    dense = torch.empty_like(tensor).copy_(tensor)
    memory = dense.as_strided((tensor.numel(),), (1,))
    found = 0
    for rank in range(3):
        if (shard := ReplicaCut(1, rank, 3).shard(tensor)) is not None:
            start, stop = shard.elements
            assert torch.equal(shard.take(tensor), memory[start:stop])
            shard.put(whole, shard.take(tensor))
            found += 1
    assert torch.equal(whole, tensor)
    assert found == max(1, min(3, num_blocks(tensor.numel())))


def test_the_order_of_memory():
    def order(tensor):
        return ReplicaCut(0, 0, 2).shard(tensor).order

    assert order(torch.randn(2, 3, 4, 5)) is None
    assert order(torch.randn(3, 4).T) == (1, 0)
    assert order(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)) == (0, 2, 3, 1)
    assert order(torch.randn(())) is None


def test_an_actor_alone_holds_whole_tensors():
    assert ReplicaCut(0, 0, 1).shard(torch.randn(3, 4).T) == Shard((4, 3))
    assert ReplicaCut(0, 0, 1).shard(torch.empty(0, 3)) == Shard((0, 3))
