"""Experts that are divided over actors: tokens travel to their experts and back by all-to-alls.

Shapes: T tokens of this actor, K choices of a token, D hidden, E experts, N rows (a token and one of its choices) in
the order of the experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from raypar.actors.collective.autograd import exchange_rows, join_rows, own_rows
from raypar.actors.collective.group import Group
from raypar.actors.sharding import Pieces


class ExpertShard(nn.ModuleDict):
    """The experts that one actor has, by their numbers among all experts of a layer.

    A token and its choices are sorted by expert, so each member of the group gets one run of rows. Members first tell
    each other how many rows they have for each expert. An expert without any rows is called with none, so its gradients
    are zeros, as in one process.

    Args:
        experts: This actor's experts by number: one slice of all.
        num_experts: Number of all experts.
        group: The actors among which the experts are divided.
        tokens: Actors that all have the same tokens, of which each one then sends only a part; None if no other actor
            has this actor's tokens.

    Source: He et al. 2021, "FastMoE", section 4; Gale et al. 2022, "MegaBlocks", section 5.
    """

    def __init__(
        self, experts: Mapping[int, nn.Module], num_experts: int, group: Group, tokens: Group | None = None
    ) -> None:
        super().__init__({str(number): expert for number, expert in experts.items()})
        self._num_experts, self._group, self._tokens = num_experts, group, tokens

    def run(self, x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """Return the sum over each token's choices of gate times expert; see ``run_experts``."""
        if self._tokens is None:
            return self._run(x_TD, chosen_TK, gates_TK)
        start, stop = Pieces.at(self._tokens.rank, self._tokens.size).span(len(x_TD))
        own = self._run(own_rows(x_TD, self._tokens), chosen_TK[start:stop], own_rows(gates_TK, self._tokens))
        return join_rows(own, self._tokens, len(x_TD))

    def _run(self, x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor) -> Tensor:
        flat = chosen_TK.flatten()
        rows = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat + 1, minlength=self._num_experts + 1)
        rows = rows[counts[0] :]  # choices that are dropped, -1, are the first ones
        tokens = rows // chosen_TK.shape[1]
        asked = self._asked(counts[1:])
        ins, outs = asked[self._group.rank].tolist(), asked[:, self._group.rank].sum(-1).tolist()
        ins = [sum(one) for one in ins]
        came = exchange_rows(x_TD.index_select(0, tokens), self._group, ins, outs)
        made = self._computed(came, asked[:, self._group.rank])
        back = exchange_rows(made, self._group, outs, ins)
        weighed = back * gates_TK.flatten().index_select(0, rows).unsqueeze(-1).to(back.dtype)
        return torch.zeros_like(x_TD).index_add(0, tokens, weighed)

    def _asked(self, counts_E: Tensor) -> Tensor:
        """Return how many rows each member has for each expert of each member: (members, members, experts of one)."""
        members = self._group.size
        asked = counts_E.new_empty((members, self._num_experts), device="cpu")
        self._group.host.all_gather(asked.view(-1), counts_E.cpu()).wait()
        return asked.view(members, members, -1)

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
