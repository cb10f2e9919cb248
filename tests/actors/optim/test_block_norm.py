"""The norm of gradients: exact sums against Python's fractions, and the same bits for any cut over actors."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raypar.actors.optim.block_norm import BlockNorms, ExactSum, GradientBlocks, global_norm
from raypar.actors.optim.votes import GradientTally
from raypar.actors.sharding import block_of
from tests.support.dispatched_ops import DispatchedOps

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)


def drawn(shape, seed, dtype=torch.float32):
    """Numbers of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    return (
        torch.complex(values, values.flip(0) if values.dim() else values).to(dtype)
        if dtype.is_complex
        else (values.to(dtype))
    )


def cut(elements, size, first):
    """Spans of whole blocks, one a rank; surplus blocks go to the ranks from ``first`` on."""
    block = block_of(elements)
    counts = [len(one) for one in np.array_split(np.arange(-(-elements // block)), size)]
    ends = np.cumsum([0, *counts]) * block
    spans = [(int(start), min(int(stop), elements)) for start, stop in pairwise(ends)]
    return [spans[(rank - first) % size] for rank in range(size)]


@given(st.lists(FLOATS, max_size=200))
def test_a_sum_is_exact(numbers):
    exact = sum((Fraction(number) ** 2 for number in numbers), Fraction())
    total = ExactSum.of(torch.tensor(numbers, dtype=torch.float32))
    assert total.units * Fraction(2) ** -298 == exact
    assert ExactSum.read(total.numbers()) == total
    assert all(0 <= number < 1 << 32 for number in total.numbers())


@given(st.lists(FLOATS, max_size=50), st.integers(1, 7), st.randoms(use_true_random=False))
def test_no_order_and_no_division_changes_a_sum(numbers, parts, order):
    whole = ExactSum.of(torch.tensor(numbers, dtype=torch.float32))
    order.shuffle(numbers)
    pieces = [ExactSum.of(torch.tensor(numbers[part::parts], dtype=torch.float32)) for part in range(parts)]
    assert sum(pieces, ExactSum()) == whole
    summed = np.sum([np.float64(piece.numbers()) for piece in pieces], axis=0).tolist()
    assert ExactSum.read(summed) == whole


@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), max_size=60))
def test_the_root_is_that_of_the_sum(numbers):
    root = ExactSum.of(torch.tensor(numbers, dtype=torch.float32)).root()
    assert root.dtype == torch.float32 and root.shape == ()
    assert root == torch.tensor(math.sqrt(math.fsum(number * number for number in numbers)), dtype=torch.float32)


def test_the_largest_and_the_smallest_numbers():
    most, least = torch.finfo(torch.float32).max, 2.0**-149
    assert ExactSum.of(torch.tensor([most])).root() == most
    assert ExactSum.of(torch.tensor([least] * 4)).root() == 2 * least
    assert ExactSum.of(torch.tensor([most] * 4)).root() == math.inf
    every = ExactSum.of(torch.tensor([most]))
    assert ExactSum(every.units << 54).numbers()[-3] < 1 << 32


def test_what_is_not_finite_is_counted():
    values = torch.tensor([1.0, math.inf, math.nan, -math.nan, 2.0, math.inf])
    total = ExactSum.of(values)
    assert (total.infinities, total.nans, total.is_finite) == (2, 2, False)
    assert total.without_units() == ExactSum(0, 2, 2)
    assert total.units == ExactSum.of(torch.tensor([1.0, 2.0])).units
    assert total.root().isnan() and ExactSum(0, 1).root() == math.inf and ExactSum().root() == 0.0


def test_the_message_has_a_fixed_size():
    sizes = {len(GradientTally(ExactSum.of(drawn(count, 0)), 0.75, 2).message()) for count in (0, 1, 10_000)}
    assert sizes == {23}
    tally = GradientTally(ExactSum.of(drawn(5, 0)), 0.1, 2)
    others = GradientTally(ExactSum(7), 0.0, 1).message() + GradientTally(ExactSum(0, 0, 1)).message()
    assert GradientTally.read(tally.message() + others) == (tally.squares + ExactSum(7, 0, 1), 0.1, 3)


SHAPES = st.lists(
    st.one_of(
        st.just(()),
        st.just((0, 3)),
        st.tuples(st.integers(1, 300)),
        st.tuples(st.integers(1, 80), st.integers(1, 1100)),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40)
@given(SHAPES, st.sampled_from(DTYPES), st.integers(0, 6))
def test_the_norm_has_the_same_bits_for_any_number_of_actors(shapes, dtype, first):
    """Tensors are cut at whole blocks, as replicas do, and dealt to pipeline ranks, as stages are."""
    whole = {f"w{index}": drawn(shape, index, dtype) for index, shape in enumerate(shapes)}
    expected = global_norm(whole, whole)
    elements = {name: one.numel() for name, one in whole.items()}
    for size in (1, 2, 3, 4, 7):
        spans = {name: cut(one.numel(), size, first) for name, one in whole.items()}
        for pp in (1, 2, 3):
            total = ExactSum()
            for rank in range(size * pp):
                own = {
                    name: one.flatten()[slice(*spans[name][rank // pp])].clone()
                    for at, (name, one) in enumerate(whole.items())
                    if at % pp == rank % pp and spans[name][rank // pp][0] < spans[name][rank // pp][1]
                }
                total += GradientBlocks(own, elements).norms(own).squares(own)
            assert torch.equal(total.root(), expected)
    exact = math.sqrt(math.fsum(float(one.abs().double().square().sum()) for one in whole.values()))
    assert expected.item() == pytest.approx(exact, rel=1e-6)


@given(st.integers(1, 70_000), st.integers(0, 100))
@settings(max_examples=30)
def test_the_norm_of_blocks_is_that_of_their_elements(count, seed):
    values = drawn(count, seed)
    norms = GradientBlocks({"w": values}).norms({"w": values}).of("w")
    exact = [float(one.double().square().sum().sqrt()) for one in values.split(block_of(count))]
    assert torch.allclose(norms, torch.tensor(exact), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("shape", [(40, 50), (300, 400), (3, 5, 7), (70, 1, 1000)])
def test_neither_strides_nor_offsets_change_a_bit(shape):
    """Blocks lie in the memory order of the parameter, whatever the gradient's is."""
    dense = drawn(shape, 0)
    expected = global_norm({"w": dense}, {"w": dense})
    shifted = torch.zeros(dense.numel() + 3)[3:].view(shape).copy_(dense)
    every_second = torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2].copy_(dense)
    backwards = torch.empty(shape[::-1]).permute(*reversed(range(len(shape)))).copy_(dense)
    for gradient in (shifted, every_second, backwards):
        assert torch.equal(global_norm({"w": gradient}, {"w": dense}), expected)
    transposed = global_norm({"w": backwards}, {"w": backwards})
    inner = backwards.permute(*reversed(range(len(shape)))).contiguous()
    assert torch.equal(transposed, global_norm({"w": inner}, {"w": inner}))
    expanded = torch.ones(1).expand(shape)
    assert global_norm({"w": expanded}, {"w": dense}).item() == pytest.approx(math.sqrt(dense.numel()))


def test_threads_change_no_bit():
    parameters = {"large": drawn((700, 300), 0), "small": drawn(5_000, 1)}
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(global_norm(parameters, parameters))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_portions_of_small_gradients_leave_no_trace(monkeypatch):
    """They use the same memory one after another, and short blocks are filled with zeros each time."""
    parameters = {f"w{index}": drawn(random.Random(index).randrange(1, 500), index) for index in range(20)}
    expected = global_norm(parameters, parameters)
    monkeypatch.setattr("raypar.actors.optim.block_norm._SCRATCH", 4096)
    blocks = GradientBlocks(parameters)
    for _ in range(2):
        assert torch.equal(blocks.norms(parameters).squares(parameters).root(), expected)
    chosen = {name: parameters[name] for name in ("w3", "w7")}
    assert torch.equal(blocks.norms(chosen).squares(chosen).root(), global_norm(chosen, chosen))
    halves = [blocks.norms({name: parameters[name] for name in list(parameters)[half::2]}) for half in (0, 1)]
    joined = BlockNorms.joined(halves)
    assert torch.equal(joined.squares(parameters).root(), expected)
    assert joined.squares(["w5"]) == blocks.norms({"w5": parameters["w5"]}).squares(["w5"])
    assert blocks.norms({}).squares([]) == ExactSum()


def test_parameters_cost_no_ops_of_their_own():
    counts = []
    for count in (2, 8, 32):
        parameters = {f"w{index}": drawn(100 + index, index) for index in range(count)}
        blocks = GradientBlocks(parameters)
        blocks.norms(parameters)
        with DispatchedOps() as mode:
            blocks.norms(parameters)
        counts.append(sum(ops.total() for ops in mode.ops))
    assert counts[0] == counts[1] == counts[2] <= 4
