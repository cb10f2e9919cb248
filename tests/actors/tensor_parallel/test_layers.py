"""Layers divided over a group are the dense layer: values, gradients (gradcheck), and what they send."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from raypar.actors.collective import autograd as ops
from raypar.actors.layers.dropout import DropoutOfShard
from raypar.actors.models.transformer import TransformerModel
from raypar.actors.sharding import Pieces, Shard, Sharding, join_shards
from raypar.actors.specs.model import GPT
from raypar.actors.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from raypar.actors.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel,
    shard_of,
)
from raypar.actors.tensor_parallel.megatron import megatron_styles
from raypar.actors.worker.build.parallelize import Parallelizer
from tests.support.local_groups import local_groups
from tests.support.logical import together
from tests.support.threads import in_threads

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def column(group, x, weight, bias):
    """With the weights of each member given."""
    layer = ColumnParallelLinear(nn.Linear(6, 4), shard_of((4, 6), 0, group))
    return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (ops.copy_to(x, group),))


def fan(group, x, *layers):
    """Of two layers, whose outputs are joined by a product; the second one has no bias."""
    left, right = column_parallel(x, [layers[:2], (layers[2], None)], group, None)
    return left * right


def fan_along(group, x, *layers):
    left, right = column_parallel(x, [layers[:2], (layers[2], None)], group, 1)
    return left * right


def product(x, weight, bias, other):
    return F.linear(x, weight, bias) * F.linear(x, other)


def row(group, x, weight, bias):
    leave = partial(ops.reduce_from, group=group, in_place=True)
    layer = RowParallelLinear(nn.Linear(4, 6), shard_of((6, 4), 1, group), leave)
    return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))


def embedding(group, ids, weight):
    cut = shard_of((7, 3), 0, group)
    layer = VocabParallelEmbedding(nn.Embedding(7, 3), cut, lambda x: ops.reduce_from(x, group))
    return torch.func.functional_call(layer, {"weight": weight}, (ids,))


def loss(group, logits, labels):
    return vocab_parallel_cross_entropy(logits, labels, shard_of((logits_of(7).shape[1],), 0, group), group, -100)


def partial_sums(group, x, w):
    """Members multiply by other columns each, so that the sum over them has all."""
    width = w.shape[1]
    columns = F.pad(w, (group.rank * width, (group.size - 1 - group.rank) * width))
    return ops.reduce_scatter(ops.all_gather(x, group, 1).sin() @ columns, group, 1)


def logits_of(vocab, dtype=torch.float64):
    return torch.randn(5, vocab, dtype=dtype, generator=torch.Generator().manual_seed(0))


def random(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()


IDS = torch.tensor([[0, 6, 3], [3, 2, 5]])
LABELS = torch.tensor([0, 6, -100, 3, 3])
CASES = {  # work, ins, out, inputs, the plain function
    "copy_to, reduce_from": (
        lambda group, x, w: ops.reduce_from(ops.copy_to(x, group) * w, group), (None, 0), None,
        (random(1, 3), random(4, 3)), None,
    ),
    "gather_from": (lambda group, x: ops.gather_from(x, group, 1).sin(), (1,), None, (random(2, 4, 3),), torch.sin),
    "all_gather, reduce_scatter": (
        partial_sums, (1, 1), 1, (random(2, 4, 3), random(3, 4)), None,
    ),
    "all_to_all": (lambda group, x: ops.all_to_all(x, group, 2, 1).sin(), (1,), 2, (random(2, 4, 4),), torch.sin),
    "column": (column, (None, 0, 0), -1, (random(2, 3, 6), random(4, 6), random(4)), F.linear),
    "fan": (fan, (None, 0, 0, 0), -1, (random(2, 3, 6), random(4, 6), random(4), random(5, 6)[:4]), product),
    "fan along": (
        fan_along, (1, 0, 0, 0), -1, (random(2, 4, 6), random(4, 6), random(4), random(5, 6)[:4]), product,
    ),
    "row": (row, (-1, 1, None), None, (random(2, 3, 4), random(6, 4), random(6)), F.linear),
    "embedding": (embedding, (None, 0), None, (IDS, random(7, 3)), F.embedding),
    "cross-entropy": (
        loss, (1, None), None, (random(5, 7), LABELS), lambda x, y: F.cross_entropy(x, y, reduction="sum"),
    ),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_finite_differences(case, size):
    work, ins, out, inputs, _ = CASES[case]
    assert torch.autograd.gradcheck(lambda *x: together(work, size, ins, out, *x), inputs, fast_mode=True)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", ["column", "fan", "row", "embedding", "cross-entropy"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_together_they_are_the_dense_layer(case, size, dtype):
    work, ins, out, inputs, plain = CASES[case]
    leaves = [x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x for x in inputs]
    ours, theirs = together(work, size, ins, out, *leaves), plain(*leaves)
    bound = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(ours, theirs, **bound, check_dtype=case != "cross-entropy")
    floating = [x for x in leaves if x.is_floating_point()]
    seed = torch.ones_like(theirs)
    for found, wanted in zip(
        torch.autograd.grad(ours, floating, seed.to(ours.dtype)),
        torch.autograd.grad(theirs, floating, seed),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, **bound)


@pytest.mark.parametrize("size", [2, 3])
def test_tensors_of_any_strides_are_communicated(size):
    x = torch.arange(2.0 * 6 * size).view(6, size, 2).permute(1, 0, 2)
    assert torch.equal(together(lambda group, x: ops.gather_from(x, group, 0), size, (0,), None, x), x)

    def reduced(group, x):
        return ops.reduce_from(x.transpose(0, 1), group)

    assert torch.equal(together(reduced, size, (None,), None, x), size * x.transpose(0, 1))


@pytest.mark.parametrize("labels", [[-100] * 5, [0, 1, 2, 3, 4], [6, 6, -100, -100, 0]])
def test_a_loss_without_labels_is_zero_and_large_logits_do_not_overflow(labels):
    labels, logits = torch.tensor(labels), (1e4 * logits_of(7)).requires_grad_()
    ours = together(loss, 3, (1, None), None, logits, labels)
    theirs = F.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(ours, theirs)
    (ours_back,), (theirs_back,) = (torch.autograd.grad(one, [logits]) for one in (ours, theirs))
    torch.testing.assert_close(ours_back, theirs_back)


def test_shares_are_even_and_each_index_has_one_owner():
    groups = local_groups("tp", 3)
    cuts = [shard_of((5, 8), 1, group) for group in groups]
    assert [cut.span(1) for cut in cuts] == [(0, 3), (3, 6), (6, 8)]
    assert [(cut.offset, cut.shape) for cut in cuts] == [((0, 0), (5, 3)), ((0, 3), (5, 3)), ((0, 6), (5, 2))]
    whole = torch.arange(40).view(5, 8)
    assert torch.equal(join_shards(cuts, [cut.take(whole) for cut in cuts]), whole)
    assert join_shards([Shard(())], [whole[0, 0]]).shape == ()


@pytest.mark.parametrize("size", [2, 4])
def test_what_they_send_is_the_formula(size):
    """A ring sends 2(N-1)/N of an all_reduce's bytes; an all_gather and a reduce_scatter half of that each."""
    groups = local_groups("tp", size)
    ring = 2 * (size - 1)

    def sent(work, *shape):
        def one(group):
            before = total(group)
            x = torch.ones(*shape, requires_grad=True)
            y = work(group, x)
            between = total(group)
            y.sum().backward()
            return between - before, total(group) - between

        (moved,) = set(in_threads(groups, one))
        return moved

    def total(group):
        return sum(entry.bytes for entry in group.ledger.entries().values())

    assert sent(lambda group, x: ops.copy_to(x, group), 8) == (0, ring * 8 * 4 // size)
    assert sent(lambda group, x: ops.reduce_from(x, group), 8) == (ring * 8 * 4 // size, 0)
    assert sent(lambda group, x: ops.all_gather(x, group, 0), 8) == ((size - 1) * 8 * 4,) * 2
    assert sent(lambda group, x: ops.reduce_scatter(x, group, 0), 8) == ((size - 1) * 8 * 4 // size,) * 2
    labels = torch.zeros(8, dtype=torch.int64)
    cuts = [shard_of((7,), 0, group) for group in groups]

    def cross_entropy(group, x):
        own = x[:, : cuts[group.rank].shape[0]]
        return vocab_parallel_cross_entropy(own, labels, cuts[group.rank], group, -100)

    assert sent(cross_entropy, 8, 7) == (3 * ring * 8 * 4 // size, 0)


@pytest.mark.parametrize("label", [-1, 7])
def test_labels_and_ids_that_nobody_has_are_refused_as_without_a_group(label):
    groups = local_groups("tp", 2)
    labels = torch.tensor([0, label])

    def loss(group):
        cut = shard_of((7,), 0, group)
        return vocab_parallel_cross_entropy(torch.zeros(2, cut.shape[0]), labels, cut, group, -100)

    def embed(group):
        whole = nn.Embedding(7, 3)
        return VocabParallelEmbedding(whole, shard_of((7, 3), 0, group), lambda x: ops.reduce_from(x, group))(labels)

    with pytest.raises(RuntimeError, match="a label is out of bounds: give 0 to 6, or -100 to leave it out"):
        in_threads(groups, loss)
    with pytest.raises(RuntimeError, match="an id is out of bounds: the embedding has 7, counted from 0"):
        in_threads(groups, embed)


def test_the_gradients_of_weights_are_computed_while_that_of_the_input_is_summed():
    """All that is computed lies between the start of the op and its end; without a fan nothing does."""
    (group,) = local_groups("tp", 1)
    order = []

    class Watched(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls):
            return False  # torch would import its compiler

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            order.append(func.overloadpacket.__name__)
            return func(*args, **kwargs or {})

    def noted(tensor):
        order.append("start")
        return SimpleNamespace(wait=lambda: order.append("wait"))

    group.all_reduce = noted
    x, weight = random(2, 3), random(4, 3)
    with Watched():
        (out,) = column_parallel(x, [(weight, None)], group, None)
        out.backward(torch.ones_like(out))
    start, wait = order.index("start"), order.index("wait")
    assert order[:start].count("mm") == 2, "the output, and the gradient of the input"
    assert order[start:wait].count("mm") == 1, "the gradient of the weight"


def test_what_is_reduced_in_place_must_be_needed_by_nobody():
    """Autograd finds out if somebody does."""

    def work(group):
        x = torch.ones(3, requires_grad=True)
        made = x.exp()  # keeps its output
        ops.reduce_from(made, group, in_place=True).sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        in_threads(local_groups("tp", 2), work)


def test_dropout_of_a_part_of_the_sequence_is_a_part_of_dropout():
    x = torch.randn(2, 6, 3)
    torch.manual_seed(1)
    wanted, parts = F.dropout(x, 0.4), []
    for group in local_groups("tp", 3):
        torch.manual_seed(1)
        parts.append(
            DropoutOfShard(0.4, Sharding({1: Pieces.at(group.rank, 3)}))(x[:, 2 * group.rank : 2 * group.rank + 2])
        )
    assert torch.equal(torch.cat(parts, 1), wanted)
    assert torch.equal(DropoutOfShard(0.4, Sharding({1: Pieces.at(0, 2)})).eval()(x), x)


def test_a_plan_changes_what_it_names_and_nothing_inside_of_that():
    model = TransformerModel(GPT(layers=2, hidden=8, heads=2, seq=4, vocab=5))
    tensors = Parallelizer(model, [megatron_styles(local_groups("tp", 2)[1], sequence=True)])
    (block,) = model.materialize([1], 0, tensors.parallelize)
    kinds = {name: type(module) for name, module in block.named_modules()}
    assert kinds["drop"] is DropoutOfShard
    assert kinds["attn.core.drop"] is nn.Dropout, "nothing is dropped, and * is one part of a name"
    assert tensors.shards["blocks.0.attn.q.weight"] == Shard((8, 8), Sharding({0: Pieces.at(1, 2)}))
    assert tensors.shards["blocks.0.mlp.down.weight"] == Shard((8, 32), Sharding({1: Pieces.at(1, 2)}))
    assert set(tensors.partial) == {
        *(f"blocks.0.norm{number}.{name}" for number in (1, 2) for name in ("weight", "bias")),
        "blocks.0.attn.out.bias",
        "blocks.0.mlp.down.bias",
    }


def test_what_has_no_equal_parts_is_told():
    with pytest.raises(ValueError, match=r"dim 1 of \[2, 5\] can't be divided equally over the 2 actors of tp: give"):
        in_threads(local_groups("tp", 2), lambda group: ops.reduce_scatter(torch.zeros(2, 5), group, 1))
