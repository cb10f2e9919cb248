"""Experts that are divided over actors: tokens travel to their experts and back by all-to-alls.

Shapes: T tokens of this actor, K choices of a token, D hidden, E experts, N rows (a token and one of its choices) in
the order of the experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from raypar.actors.autograd.recompute import Anchored
from raypar.actors.collective.autograd import exchange_rows, join_rows, own_rows
from raypar.actors.collective.group import Group
from raypar.actors.expert_parallel.experts import DividedExperts, combine, order_of, spread
from raypar.actors.sharding import Pieces


class ExpertShard(DividedExperts, Anchored):
    """One actor's experts, and the way to those of the other actors.

    Choices are sorted by expert, so each actor gets one run of rows. Actors first tell each other how many rows they
    have for each expert. An expert without any rows is called with none, so its gradients are zeros, as in one process.

    Args:
        experts: This actor's experts by number: one slice of all; none if it only sends tokens to those of others.
        num_experts: Number of all experts.
        group: The actors that have tokens or experts.
        holders: The ranks in the group of those that have experts, one slice each.
        tokens: Actors that all have the same tokens, of which each one then sends only a part; None if no other actor
            has this actor's tokens.

    Source: He et al. 2021, "FastMoE", section 4; Gale et al. 2022, "MegaBlocks", section 5.
    """

    def __init__(
        self,
        experts: Mapping[int, nn.Module],
        num_experts: int,
        group: Group,
        holders: range,
        tokens: Group | None = None,
    ) -> None:
        super().__init__({str(number): expert for number, expert in experts.items()})
        self._num_experts, self._group, self._holders, self._tokens = num_experts, group, holders, tokens
        self.anchor = torch.empty(0, device="cpu", requires_grad=True)

    def run(self, x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """Return for each token the sum of what its experts make of it; see ``run_experts``."""
        if self._tokens is None:
            return self._run(x_TD, chosen_TK, gates_TK)
        start, stop = Pieces.at(self._tokens.rank, self._tokens.size).span(len(x_TD))
        own = self._run(own_rows(x_TD, self._tokens), chosen_TK[start:stop], own_rows(gates_TK, self._tokens))
        return join_rows(own, self._tokens, len(x_TD))

    def serve(self, link: Tensor) -> Tensor:
        """Compute what other actors send, on an actor without tokens of its own.

        The backward through the returned tensor computes the backward of what they sent.

        Args:
            link: No rows (0, 1), from the call before this one, which ties the backwards of calls together in order.

        Returns:
            No rows (0, 1).
        """
        asked, width = self._asked([0] * self._num_experts, 0)
        return self._made(link.expand(0, width), asked)[:, :1]

    def _run(self, x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor) -> Tensor:
        order = order_of(chosen_TK, self._num_experts, tokens=len(x_TD))
        asked, _ = self._asked(order.counts, x_TD.shape[1])
        return combine(self._made(spread(x_TD, order), asked), gates_TK, order)

    def _made(self, rows_ND: Tensor, asked: Tensor) -> Tensor:
        """Return what the experts make of this actor's rows.

        Args:
            rows_ND: The rows, in the order of the experts that they go to.
            asked: How many rows each actor has for each expert (actors, E).
        """
        group, holders = self._group, self._holders
        by_holder = asked[group.rank].view(len(holders), -1).sum(1).tolist()
        there = [*[0] * holders.start, *by_holder, *[0] * (group.size - holders.stop)]
        here = asked[:, self._own]
        came_ND = exchange_rows(self.anchored(rows_ND), group, there, here.sum(1).tolist())
        made_ND = self._computed(came_ND, here) if len(self) else came_ND
        return exchange_rows(made_ND, group, here.sum(1).tolist(), there)

    @property
    def _own(self) -> slice:
        """The numbers of this actor's experts."""
        if not len(self):
            return slice(0, 0)
        return slice(*Pieces.at(self._group.rank - self._holders.start, len(self._holders)).span(self._num_experts))

    def _asked(self, counts: Sequence[int], width: int) -> tuple[Tensor, int]:
        """Return how many rows each actor has for each expert (actors, E), and the width of a row.

        Args:
            counts: How many rows this actor has for each expert.
            width: The width of its rows; 0 if it never has any.
        """
        own = torch.tensor([*counts, width])
        told = own.new_empty(self._group.size * len(own))
        self._group.host.all_gather(told, own).wait()
        told = told.view(self._group.size, -1)
        return told[:, :-1], int(told[:, -1].max())

    def _computed(self, came_ND: Tensor, asked: Tensor) -> Tensor:
        """Run this actor's experts.

        Args:
            came_ND: The rows that came, in the order of their senders, and of the experts for each.
            asked: Number of rows by sender and expert (members, experts of this actor).

        Returns:
            What the experts make of each row (N, D), in the order of the rows.
        """
        senders, experts = asked.shape
        starts = (asked.flatten().cumsum(0) - asked.flatten()).view(senders, experts)
        runs = [
            torch.arange(start, start + count)
            for expert in range(experts)
            for start, count in zip(starts[:, expert].tolist(), asked[:, expert].tolist(), strict=True)
        ]
        by_expert = torch.cat(runs).to(came_ND.device)
        parts = came_ND.index_select(0, by_expert).split(asked.sum(0).tolist())
        made = torch.cat([expert(part) for expert, part in zip(self.values(), parts, strict=True)])
        return made.index_select(0, by_expert.argsort())
