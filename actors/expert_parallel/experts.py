"""Compute every token with the experts that its router chose.

Shapes: T tokens, D width of a token, K choices of a token, N choices of all tokens that were not dropped, E experts.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.autograd.apply_function import apply_function

DROPPED = -1  # instead of an expert's number: a dropped choice


class Order(NamedTuple):
    """The choices that are not dropped, sorted by expert, then by token.

    Attributes:
        tokens: The token of each choice: (N,) int64.
        places: Position of each choice in the flattened (T, K): (N,) int64.
        rows: The inverse, (T, K) int64: index of a choice among the N; 0 for a dropped one.
        kept: (T, K), whether a choice is not dropped; None if no choice is dropped.
        counts: Number of choices of each expert; their sum is N.
    """

    tokens: Tensor
    places: Tensor
    rows: Tensor
    kept: Tensor | None
    counts: list[int]


class DividedExperts(nn.ModuleDict):
    """The experts of one actor, by their numbers among all experts of a layer. See token_exchange.py.

    Attributes:
        most_rows: The most tokens of any actor that an expert computes in one call, where that is known and the same on
            all actors, and rows are to be padded to it, so that the host needs no numbers of the device; else None.
    """

    most_rows: int | None = None

    @abstractmethod
    def run(self, x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """Compute ``run_experts`` with the experts of all actors."""


def run_experts(x_TD: Tensor, experts: nn.ModuleList | DividedExperts, chosen_TK: Tensor, gates_TK: Tensor) -> Tensor:
    """Return for each token the sum of its experts' outputs, weighted by its gates.

    Every expert is called once, with all tokens that chose it, in their order; also with none, so that its gradients
    are zeros then. The same call gives the same bits.

    Args:
        x_TD: The tokens, floating-point.
        experts: The experts, each (n, D) -> (n, D'), for any n from 0 on. With expert parallelism D' is D.
        chosen_TK: The experts that each token chose, int64, from 0 on; -1 for a choice that was dropped.
        gates_TK: The weight of each choice, floating-point. That of a dropped one has no effect.

    Returns:
        The sums (T, D'), in the dtype that the experts return. A token whose choices were all dropped gets zeros.

    Raises:
        ValueError: The shapes do not fit, or there is no expert of a chosen number.
    """
    tokens = _demand_fit(x_TD, chosen_TK, gates_TK)
    if isinstance(experts, DividedExperts):
        return experts.run(x_TD, chosen_TK, gates_TK)
    order = order_by_expert(chosen_TK, len(experts), tokens=tokens)
    rows = spread(x_TD, order).split(order.counts)
    outs = [expert(part) for expert, part in zip(experts, rows, strict=True)]
    return combine(torch.cat(outs), gates_TK, order)


def order_by_expert(chosen_TK: Tensor, num_experts: int, *, tokens: int) -> Order:
    """Sort choices by expert. Raises ValueError if there is no expert of a chosen number.

    Args:
        chosen_TK: The experts that each token chose, int64; -1 for a dropped choice.
        num_experts: Number of experts.
        tokens: Number of tokens.
    """
    flat, choices = chosen_TK.flatten(), chosen_TK.shape[1]
    experts, places = flat.sort(stable=True)
    numbers = torch.arange(DROPPED - 1, num_experts, device=flat.device)
    below, dropped, *ends = torch.searchsorted(experts, numbers, right=True).tolist()  # the only numbers that are read
    if below:
        raise ValueError(f"chosen has the number {int(experts[0])}: experts count from 0, and -1 is a dropped choice")
    if [dropped, *ends][-1] < len(experts):
        raise ValueError(f"chosen has expert {int(experts[-1])}, and there are {num_experts}, counted from 0")
    counts = [end - start for start, end in pairwise((dropped, *ends))]
    places_N = places[dropped:]
    rows = torch.zeros_like(flat)
    rows[places_N] = torch.arange(len(places_N), device=flat.device)
    kept = chosen_TK >= 0 if dropped else None
    return Order(places_N // max(choices, 1), places_N, rows.view(tokens, choices), kept, counts)


def spread(x_TD: Tensor, order: Order) -> Tensor:
    """Return the token of each choice (N, D), in the order of the choices."""
    return apply_function(_Spread, x_TD, order)


def combine(rows_ND: Tensor, gates_TK: Tensor, order: Order) -> Tensor:
    """Return for each token the sum (T, D) of its choices' rows, weighted by its gates."""
    return apply_function(_Combine, rows_ND, gates_TK.to(rows_ND.dtype), order)


class _Spread(torch.autograd.Function):
    """``spread``. Torch's backward of it sums in another order, which varies on GPUs."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return x_TD.index_select(0, order.tokens)

    @staticmethod
    def backward(ctx: Any, rows_ND: Tensor) -> tuple[Tensor, None]:
        order: Order = ctx.order
        ones_TK = rows_ND.new_ones(order.rows.shape)
        return _sums(rows_ND, ones_TK, order), None


class _Combine(torch.autograd.Function):
    """``combine``, which saves no rows in the order of the tokens."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, gates_TK: Tensor, order: Order) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(rows_ND, gates_TK)
        return _sums(rows_ND, gates_TK, order)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        order: Order = ctx.order
        rows_ND, gates_TK = ctx.saved_tensors
        grad_ND = grad_TD.index_select(0, order.tokens)
        of_gates = of_rows = None
        if ctx.needs_input_grad[1]:
            flat = torch.linalg.vecdot(grad_ND, rows_ND)
            of_gates = flat.index_select(0, order.rows.flatten()).view_as(gates_TK) if len(flat) else gates_TK * 0.0
            of_gates = of_gates if order.kept is None else of_gates.masked_fill(~order.kept, 0.0)
        if ctx.needs_input_grad[0]:
            of_rows = grad_ND * gates_TK.flatten().index_select(0, order.places).unsqueeze(1)
        return of_rows, of_gates, None


def _sums(rows_ND: Tensor, weights_TK: Tensor, order: Order) -> Tensor:
    """Return for each token the weighted sum (T, D) of its rows, added up in the order of its choices."""
    if not len(rows_ND):
        return rows_ND.new_zeros((len(order.rows), rows_ND.shape[1]))
    if order.kept is not None:
        weights_TK = weights_TK.masked_fill(~order.kept, 0.0)
    return F.embedding_bag(order.rows, rows_ND, per_sample_weights=weights_TK, mode="sum")


def _demand_fit(x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor) -> int:
    """Return the number of tokens. Raises ValueError if the tensors' shapes do not fit each other."""
    if x_TD.dim() != 2 or chosen_TK.dim() != 2 or len(chosen_TK) != len(x_TD) or chosen_TK.dtype != torch.int64:
        raise ValueError(
            f"run_experts takes tokens (T, D) and the experts that they chose (T, K) as int64, and is given "
            f"{tuple(x_TD.shape)} and {tuple(chosen_TK.shape)} as {chosen_TK.dtype}: flatten batch and sequence"
        )
    if gates_TK.shape != chosen_TK.shape:
        raise ValueError(
            f"gates are {tuple(gates_TK.shape)}, and chosen is {tuple(chosen_TK.shape)}: give one a choice"
        )
    return len(x_TD)
