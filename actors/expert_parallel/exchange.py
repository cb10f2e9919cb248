"""Experts that are divided over actors: tokens travel to their experts and back by all-to-alls.

Shapes: T tokens of this actor, K choices of a token, D hidden, E experts, N rows (a token and one of its choices) in
the order of the experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.func import functional_call

from raypar.actors.collective.autograd import exchange_rows, join_rows, own_rows
from raypar.actors.collective.group import Group
from raypar.actors.expert_parallel.experts import DividedExperts, combine, order_of, spread
from raypar.actors.expert_parallel.record import Routed
from raypar.actors.expert_parallel.shadowing import Shadowing, dispatch
from raypar.actors.sharding import Pieces
from raypar.actors.tensors import nbytes


class ExpertShard(DividedExperts, Routed):
    """One actor's experts, and the way to those of the other actors.

    Choices are sorted by expert, so each actor gets one run of rows. Actors first tell each other how many rows they
    have for each expert. An expert without any rows is called with none, so its gradients are zeros, as in one process.

    Args:
        experts: This actor's experts by number: one slice of all.
        num_experts: Number of all experts.
        group: The actors among which the experts are divided.
        tokens: Actors that all have the same tokens, of which each one then sends only a part; None if no other actor
            has this actor's tokens.
        shadows: The most experts that are shadowed at a time: see shadowing.py.

    Source: He et al. 2021, "FastMoE", section 4; Gale et al. 2022, "MegaBlocks", section 5.
    """

    def __init__(
        self,
        experts: Mapping[int, nn.Module],
        num_experts: int,
        group: Group,
        tokens: Group | None = None,
        shadows: int = 0,
    ) -> None:
        super().__init__({str(number): expert for number, expert in experts.items()})
        self._num_experts, self._group, self._tokens, self._most = num_experts, group, tokens, shadows
        # A module without weights of its own, to compute with those of others. It is none of this actor's modules.
        self._guest = [deepcopy(next(iter(experts.values())))] if shadows else []

    def run(self, x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """Return for each token the sum of what its experts make of it; see ``run_experts``."""
        if self._tokens is None:
            return self._run(x_TD, chosen_TK, gates_TK)
        start, stop = Pieces.at(self._tokens.rank, self._tokens.size).span(len(x_TD))
        own = self._run(own_rows(x_TD, self._tokens), chosen_TK[start:stop], own_rows(gates_TK, self._tokens))
        return join_rows(own, self._tokens, len(x_TD))

    def _run(self, x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor) -> Tensor:
        group, order = self._group, order_of(chosen_TK, self._num_experts, tokens=len(x_TD))
        asked, rows_ND = self._asked(order.counts), spread(x_TD, order)
        if self._most and (shadows := self._chosen(asked, rows_ND)):
            return combine(self._with_shadows(rows_ND, asked, order.counts, shadows), gates_TK, order)
        there, here = asked[group.rank].sum(1).tolist(), asked[:, group.rank]
        came_ND = exchange_rows(rows_ND, group, there, here.sum(1).tolist())
        made_ND = self._computed(came_ND, here)
        return combine(exchange_rows(made_ND, group, here.sum(1).tolist(), there), gates_TK, order)

    def _chosen(self, asked: Tensor, rows_ND: Tensor) -> tuple[int, ...]:
        """Return the experts to shadow, which the record is told."""
        weights = [*next(iter(self.values())).parameters()]
        count, each = sum(weight.numel() for weight in weights), sum(map(nbytes, weights))
        row = rows_ND.shape[1] * rows_ND.element_size()
        choice = Shadowing(self._most, count, row, each).choose(asked.tolist())
        if self.record is not None and self._group.rank == 0:
            self.record.shadows(self.name, self._num_experts, choice)
        return choice.slots

    def _with_shadows(self, rows_ND: Tensor, asked: Tensor, counts: Sequence[int], shadows: tuple[int, ...]) -> Tensor:
        """Compute rows whose experts are here for now, and let the others travel.

        Args:
            rows_ND: The rows of this actor's tokens, in the order of the experts.
            asked: How many rows each actor has for each expert of each one.
            counts: Number of rows by expert.
            shadows: The experts that are shadowed.

        Returns:
            What the experts make of each row (N, D), in the order of the rows.
        """
        group, each, parts = self._group, len(self), rows_ND.split(list(counts))
        asked = asked.clone()
        visits = [(slot // each, self._weights_of(slot, rows_ND)) for slot in shadows]
        for slot in shadows:
            asked[:, slot // each, slot % each] = 0
        away = [slot for slot in range(len(counts)) if slot not in shadows]
        there, here = asked[group.rank].sum(1).tolist(), asked[:, group.rank]
        gone_ND = torch.cat([parts[slot] for slot in away])
        came_ND, weights = dispatch(gone_ND, group, there, here.sum(1).tolist(), visits)
        back_ND = exchange_rows(self._computed(came_ND, here), group, here.sum(1).tolist(), there)
        made = dict(zip(away, back_ND.split([counts[slot] for slot in away]), strict=True))
        guest = self._guest[0].train(self.training)
        names = [name for name, _ in guest.named_parameters()]
        for slot, theirs in zip(shadows, weights, strict=True):
            made[slot] = functional_call(guest, dict(zip(names, theirs, strict=True)), (parts[slot],))
        return torch.cat([made[slot] for slot in range(len(counts))])

    def _weights_of(self, slot: int, like: Tensor) -> tuple[Tensor, ...]:
        """Return an expert's weights if it is here, else tensors like them, of undefined values."""
        owner, local = divmod(slot, len(self))
        own = [*self.values()][local if owner == self._group.rank else 0].parameters()
        if owner == self._group.rank:
            return tuple(own)
        return tuple(torch.empty(weight.shape, dtype=weight.dtype, device=like.device) for weight in own)

    def _asked(self, counts: Sequence[int]) -> Tensor:
        """Return how many rows each actor has for each expert of each one: (actors, actors, experts of one)."""
        own = torch.tensor(counts)
        asked = own.new_empty(self._group.size * len(own))
        self._group.host.all_gather(asked, own).wait()
        return asked.view(self._group.size, self._group.size, -1)

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
