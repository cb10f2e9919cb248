"""All experts of an actor at once: one product for each of their linear layers, and no number that the host reads.

On GPUs the host would wait for the number of tokens of each expert before it can call the experts one by one.

Shapes: T tokens, K choices of a token, N = T x K choices, E experts, D and F widths of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raypar.actors.expert_parallel.experts import Order, combine, spread

ALIGNED = 8  # widths are multiples of it, as the kernels want rows to begin at multiples of 16 bytes


class ExpertRows(NamedTuple):
    """The rows of choices, sorted by expert, then by token; those of dropped choices come last.

    Attributes:
        ends: Where the rows of each expert end: (E,) int32.
        experts: The expert of each row, E for those of dropped choices: (N,) int64.
    """

    ends: Tensor
    experts: Tensor


def suits_grouped(x_TD: Tensor) -> bool:
    """Return whether tokens are on a device and in a dtype whose products can be grouped without a wait."""
    return x_TD.device.type != "cpu" and x_TD.dtype == torch.bfloat16


def pads_rows(x_TD: Tensor) -> bool:
    """Return whether rows that are exchanged are padded to the capacity, as the host would wait for their number."""
    return x_TD.device.type != "cpu"


def run_grouped(
    x_TD: Tensor,
    chosen_TK: Tensor,
    gates_TK: Tensor,
    num_experts: int,
    compute: Callable[[Tensor, ExpertRows], Tensor],
    *,
    may_drop: bool,
) -> Tensor:
    """Return for each token the sum (T, D) of its experts' outputs, weighted by its gates; see ``run_experts``.

    Args:
        x_TD: The tokens.
        chosen_TK: The experts that each token chose, int64, each from 0 to E - 1, or -1 for a dropped choice.
        gates_TK: The weight of each choice.
        num_experts: Number E of experts.
        compute: Computes the rows (N, D) of all experts. Rows of dropped choices may become anything.
        may_drop: Whether choices may be dropped.
    """
    flat_N = chosen_TK.flatten()
    by_expert = flat_N.masked_fill(flat_N < 0, num_experts) if may_drop else flat_N
    experts_N, places_N = by_expert.sort(stable=True)
    numbers_E = torch.arange(num_experts, device=x_TD.device)
    ends_E = torch.searchsorted(experts_N, numbers_E, right=True, out_int32=True)
    rows_N = torch.empty_like(places_N).scatter_(0, places_N, torch.arange(len(places_N), device=x_TD.device))
    kept_TK = chosen_TK >= 0 if may_drop else None
    order = Order(places_N // chosen_TK.shape[1], places_N, rows_N.view_as(chosen_TK), kept_TK, [])
    dropped_N1 = (experts_N == num_experts).unsqueeze(1) if may_drop else None
    rows_ND = _without(spread(x_TD, order), dropped_N1)  # here for the gradient of rows that no product writes
    return combine(_without(compute(rows_ND, ExpertRows(ends_E, experts_N)), dropped_N1), gates_TK, order)


def run_padded(
    x_TD: Tensor,
    chosen_TK: Tensor,
    gates_TK: Tensor,
    num_experts: int,
    most: int,
    compute: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return for each token the sum (T, D) of its experts' outputs, each expert called with the same number of rows.

    Other arguments are those of ``run_grouped``.

    Args:
        most: The most choices of one expert. Missing ones are rows of zeros, whose outputs count nowhere.
        compute: Computes the rows (E x most, D) of all experts, in the order of the experts.
    """
    flat_N, places = chosen_TK.flatten(), num_experts * most
    experts_N, choices_N = flat_N.masked_fill(flat_N < 0, num_experts).sort(stable=True)
    at_N = torch.arange(len(flat_N), device=x_TD.device) - torch.searchsorted(experts_N, experts_N)
    rows_N = (experts_N * most + at_N).clamp(max=places)  # dropped ones share one more row, which is cut off
    choice_of = choices_N.new_zeros(places + 1).scatter_(0, rows_N, choices_N)[:-1]
    is_empty = torch.ones(places + 1, dtype=torch.bool, device=x_TD.device).scatter_(0, rows_N, False)[:-1, None]
    rows_TK = torch.empty_like(choices_N).scatter_(0, choices_N, rows_N.clamp(max=places - 1)).view_as(chosen_TK)
    order = Order(choice_of // chosen_TK.shape[1], choice_of, rows_TK, chosen_TK >= 0, [])
    return combine(_without(compute(_without(spread(x_TD, order), is_empty)), is_empty), gates_TK, order)


def grouped_linear(x_ND: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], rows: ExpertRows) -> Tensor:
    """Multiply each row by the weight of its expert, and add its bias: (N, F).

    Args:
        x_ND: The rows.
        weights: The weight of each expert, (F, D).
        biases: Its bias, (F,); none without biases.
        rows: The experts of the rows.
    """
    out_NF = F.grouped_mm(x_ND, torch.stack([*weights]).transpose(1, 2), offs=rows.ends)
    if not biases:
        return out_NF
    of_dropped = torch.zeros_like(biases[0])  # and has no gradient
    return out_NF + F.embedding(rows.experts, torch.stack([*biases, of_dropped]), padding_idx=len(biases))


def _without(rows_ND: Tensor, dropped_N1: Tensor | None) -> Tensor:
    """Return rows in which those of dropped choices, and their gradients, are zeros."""
    return rows_ND if dropped_N1 is None else rows_ND.masked_fill(dropped_N1, 0.0)
