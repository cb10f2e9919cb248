"""Linear layers and embeddings whose weights are sharded over a group.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.autograd.recompute import SelectiveRecompute
from raypar.actors.autograd.torch_private import demand_later
from raypar.actors.collective.autograd import Move, all_gathered, begin_sum
from raypar.actors.collective.group import Group
from raypar.actors.layers.adapter import SummedLinear
from raypar.actors.layers.linear import (
    TORCH,
    Pair,
    Postponable,
    Postponer,
    Products,
    ProductsLinear,
    SharedInputLinears,
    Use,
    linear_product,
    products_of_part,
)
from raypar.actors.sharding import Pieces, Shard, Sharding
from raypar.actors.tensor_parallel.plan_guard import mark


class PostponableLinear(ProductsLinear, Postponable):
    """A linear layer of which a member has a part, and whose weight gradients may be deferred.

    Args:
        whole: The layer to shard.
        shard: This member's part of the weight (out, in).
        bias: Whether it adds a bias (own out,), if the whole layer does.
    """

    def __init__(self, whole: nn.Linear, shard: Shard, *, bias: bool = True) -> None:
        outputs, inputs = shard.shape
        super().__init__(inputs, outputs, bias and whole.bias is not None, dtype=whole.weight.dtype)
        self.products = products_of_part(whole)

    def later(self, x: Tensor) -> Postponer | None:
        """Return what defers the gradients of the weights for an input (..., in); None: the backward computes them."""
        return self.postponer if self.postponer is not None and self.postponer.wants(x, self) else None


class ColumnParallelLinear(PostponableLinear):
    """A linear layer sharded by outputs: (..., in) -> (..., own outputs).

    Its input must have passed ``copy_to``, which sums the members' gradients of the input. Its arguments are the layer
    to shard, and this member's part of the weight (out, in) along dim 0, which is also that of the bias (out,).
    """

    def forward(self, input: Tensor) -> Tensor:
        return mark(own_product(self, input, self.bias), divided=True)


class SharedLinear(ProductsLinear):
    """A replicated linear layer, of which each member computes some outputs: (..., in) -> (..., own outputs).

    Several members may compute the same outputs. A member's gradient of the weight is partial.

    Args:
        whole: The layer that every member holds.
        span: Index of the first output that this member computes, and the index after its last.
    """

    def __init__(self, whole: nn.Linear, span: tuple[int, int]) -> None:
        super().__init__(whole.in_features, whole.out_features, whole.bias is not None, dtype=whole.weight.dtype)
        self.span, self.products = slice(*span), products_of_part(whole)

    def forward(self, x: Tensor) -> Tensor:
        return linear_product(self.products, x, *own_outputs(self))


class RowParallelLinear(PostponableLinear, SummedLinear):
    """A linear layer sharded by inputs: Y = sum_i X_i W_i over the members, (..., own inputs) -> (..., out).

    Args:
        whole: The layer to shard.
        shard: This member's part of the weight (out, in), along dim 1. The bias is replicated, and added after the sum.
        leave: Sums the products over the members: ``reduce_from`` or ``reduce_scatter`` of the group.
        label: The layer's name in error messages.
    """

    def __init__(self, whole: nn.Linear, shard: Shard, leave: Move, label: str = "a row linear layer") -> None:
        super().__init__(whole, shard)
        self.whole, self.leave, self.label = whole.in_features, leave, label

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer. Raises ValueError if the input is not sharded as the weight is."""
        return self.with_added(input, None)

    def with_added(self, input: Tensor, added: Tensor | None) -> Tensor:
        """Apply the layer; an adapter's output ``added`` is summed with the products, in the same message."""
        if input.shape[-1] != self.in_features:
            raise ValueError(
                f"{self.label} of {self.whole} inputs has {self.in_features} of them here and is given "
                f"{input.shape[-1]}: give it what a column linear layer of {self.whole} outputs has made, or let "
                "it be 'row_split_input' in a plan"
            )
        products = own_product(self, input, None)
        out = self.leave(products if added is None else products + added)
        return mark(out if self.bias is None else out.add_(self.bias), divided=False)  # in place: nothing else uses it


class VocabParallelEmbedding(nn.Embedding):
    """An embedding sharded by ids, whose vectors are summed over the members: ids (...) int64 -> (..., D).

    A row for padding gets no gradient, as in torch.

    Args:
        whole: The embedding to shard.
        shard: This member's part of the table (V, D).
        leave: Sums the vectors over the members: ``reduce_from`` or ``reduce_scatter`` of the group.
        gather: Gathers the rest of the member's rows, if the table is sharded along dim 1 too; else None.
    """

    def __init__(self, whole: nn.Embedding, shard: Shard, leave: Move, gather: Move | None = None) -> None:
        ids, width = shard.shape
        super().__init__(ids, width, dtype=whole.weight.dtype)
        (self.start, self.stop), self.ids = shard.span(0), shard.whole[0]
        if whole.padding_idx is not None and self.start <= whole.padding_idx < self.stop:
            self.padding_idx = whole.padding_idx - self.start
        self.leave, self.gather = leave, gather

    def forward(self, input: Tensor) -> Tensor:
        """Embed ids. Raises RuntimeError if an id is not in the vocabulary."""
        known = ((input >= 0) & (input < self.ids)).all()
        demand_later(known, f"an id is out of bounds: the embedding has {self.ids}, counted from 0")
        foreign = (input < self.start) | (input >= self.stop)
        weight = self.weight if self.gather is None else self.gather(self.weight)
        own = F.embedding((input - self.start).masked_fill(foreign, 0), weight, self.padding_idx)
        return self.leave(own.masked_fill(foreign.unsqueeze(-1), 0.0))


def own_product(layer: PostponableLinear, x: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x (..., in) by this member's part of a layer's weight (out, in), whose gradient may be deferred.

    Returns:
        The product (..., out), plus the bias (out,) if there is one.
    """
    later = layer.later(x)
    if later is None:
        return linear_product(layer.products, x, layer.weight, bias)
    (out,) = later.product(layer.products, x, [(layer.weight, bias)])
    return out


def own_outputs(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return the weight (own out, in) and the bias (own out,) of the outputs that a layer computes."""
    if not isinstance(linear, SharedLinear):
        return linear.weight, linear.bias
    return linear.weight[linear.span], None if linear.bias is None else linear.bias[linear.span]


def shard_of(whole: Sequence[int], dim: int, group: Group) -> Shard:
    """Return this member's part of a tensor that is sharded over a group along one dim.

    Args:
        whole: Shape of the whole tensor.
        dim: The dim.
        group: The members.
    """
    return Shard(tuple(whole), Sharding({dim: Pieces.at(group.rank, group.size)}))


class ColumnParallelFan(SharedInputLinears, Postponable, SelectiveRecompute):
    """Layers of one input that are sharded by outputs, with one message for the input of all of them.

    With selective recomputation it keeps only its own part of a sharded input, and gathers it again in the backward
    (Korthikanti et al. 2022, section 4.2.2).

    Args:
        group: The members.
        dim: The dim along which the input is sharded; None if the input is replicated.
    """

    def __init__(self, group: Group, dim: int | None) -> None:
        super().__init__()
        self.group, self.dim = group, dim

    def forward(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        later = self.postponer
        if later is not None and (any(map(_is_shared, linears)) or not later.wants(x, *linears)):
            later = None
        pairs = [own_outputs(linear) for linear in linears]
        products = [*map(products_of_part, linears)]
        return column_parallel(x, pairs, self.group, self.dim, products, again=self.recomputes, later=later)


def column_parallel(
    x: Tensor,
    layers: Sequence[Pair],
    group: Group,
    dim: int | None,
    products: Sequence[Products] = (),
    *,
    again: bool = False,
    later: Postponer | None = None,
) -> tuple[Tensor, ...]:
    """Apply several linear layers, sharded by outputs, to one input.

    The result is that of ``copy_to`` (if ``dim`` is None) or ``all_gather``, followed by each layer. The backward
    computes the gradients of the weights while the gradient of the input is summed, as Megatron-LM does.

    Args:
        x: The input (B, ..., in), or this member's part of it along ``dim``.
        layers: The weight (own out, in) and the bias (own out,) of each layer.
        group: The members.
        dim: The dim along which the input is sharded; None if it is replicated.
        products: The matrix products of each layer; torch's if none are given.
        again: Save only the part of the input, and gather it again in the backward.
        later: Defers the gradients of the weights; None computes them in the backward.

    Returns:
        The outputs (B, ..., own out) of each layer.
    """
    seen = [weight for weight, _ in layers] + [bias for _, bias in layers] if later is None else [later.anchor]
    with_products = layers, products or [TORCH] * len(layers)
    outs: tuple[Tensor, ...] = _Columns.apply(group, dim, again, later, with_products, x, *seen)  # type: ignore[no-untyped-call]
    return outs


def _is_shared(linear: nn.Linear) -> bool:
    return isinstance(linear, SharedLinear)


class _Columns(torch.autograd.Function):
    """The layers of ``column_parallel``. ``seen``: their weights, then as many biases; or the anchor of ``later``."""

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        dim: int | None,
        again: bool,
        later: Postponer | None,
        with_products: tuple[Sequence[Pair], Sequence[Products]],
        x: Tensor,
        *seen: Any,
    ) -> tuple[Tensor, ...]:
        layers, ctx.products = with_products
        whole = x if dim is None else all_gathered(group, dim, x)
        ctx.group, ctx.dim, ctx.again = group, dim, again and dim is not None
        ctx.later, ctx.layers = later, layers  # hooks of saved tensors return other objects
        ctx.save_for_backward(x if ctx.again else whole, *(weight for weight, _ in layers))
        return tuple([of.linear(whole, *pair) for of, pair in zip(ctx.products, layers, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        kept, *weights = ctx.saved_tensors
        rows = [gradient.flatten(0, -2) for gradient in gradients]
        total = ctx.products[0].inner(rows[0], weights[0])
        for products, gradient, weight in zip(ctx.products[1:], rows[1:], weights[1:], strict=True):
            if products is TORCH:
                total.addmm_(gradient, weight)
            else:
                total.add_(products.inner(gradient, weight))
        handle, summed = begin_sum(ctx.group, total.view(*gradients[0].shape[:-1], -1), ctx.dim)
        whole = all_gathered(ctx.group, ctx.dim, kept) if ctx.again else kept
        inputs, wanted = whole.flatten(0, -2), ctx.needs_input_grad[6:]
        made: list[Tensor | None] = [None] * len(wanted)
        if ctx.later is not None:
            for (weight, bias), gradient in zip(ctx.layers, rows, strict=True):
                ctx.later.postpone(weight, bias, Use(inputs.detach(), gradient))
        else:
            made = [gradient.t() @ inputs if wants else None for gradient, wants in zip(rows, wanted, strict=False)]
            biases = zip(rows, wanted[len(rows) :], strict=True)
            made += [gradient.sum(0) if wants else None for gradient, wants in biases]
        handle.wait()
        return None, None, None, None, None, summed, *made
