"""Experts that are divided over actors, or have actors of their own: all-to-alls send tokens to them and back.

Shapes: T tokens of this actor, K choices of a token, D hidden, E experts, N rows (a token and one of its choices) in
the order of the experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.func import functional_call

from raypar.actors.autograd.recompute import Anchored
from raypar.actors.collective.autograd import all_to_all_rows, join_rows, own_rows
from raypar.actors.collective.group import Group
from raypar.actors.expert_parallel.experts import DividedExperts, combine, order_by_expert, spread
from raypar.actors.expert_parallel.grouped import run_padded
from raypar.actors.expert_parallel.record import Routed
from raypar.actors.expert_parallel.rounds import Trip, in_rounds
from raypar.actors.expert_parallel.shadowing import Shadowing, dispatch
from raypar.actors.sharding import Pieces
from raypar.actors.tensors import nbytes


class TokenExchange(DividedExperts, Anchored, Routed):
    """One actor's experts, and the exchange of tokens with all other actors.

    Choices are sorted by expert, so each actor gets one contiguous part of the rows. Actors first exchange the number
    of rows for each expert. An expert without rows is called with none, so its gradients are zeros, as in one process.

    Args:
        experts: This actor's experts by number: one slice of all; none if it only sends tokens to other actors.
        order: The numbers of all experts, in the order in which they are divided.
        group: The actors that have tokens or experts.
        holders: The ranks in the group of the actors that have experts, one slice each.
        tokens: The actors that have the same tokens, each of which sends only a part of them; None if no other actor
            has this actor's tokens.
        shadows: Largest number of experts that are shadowed: see shadowing.py. Every actor must have experts.
        rounds: Number of rounds of the exchange, at most the experts of an actor: see rounds.py.

    Source: He et al. 2021, "FastMoE", section 4; Gale et al. 2022, "MegaBlocks", section 5.
    """

    def __init__(
        self,
        experts: Mapping[int, nn.Module],
        order: Sequence[int],
        group: Group,
        holders: range,
        tokens: Group | None = None,
        shadows: int = 0,
        rounds: int = 1,
    ) -> None:
        super().__init__({str(number): expert for number, expert in experts.items()})
        self._order, self._num_experts = tuple(order), len(order)
        self._group, self._holders, self._tokens = group, holders, tokens
        self._most, self._rounds = shadows, rounds
        # A module to compute with other actors' weights. It is not registered as a submodule.
        self._guest = [_without_weights(next(iter(experts.values())))] if shadows else []
        self.anchor = torch.empty(0, device="cpu", requires_grad=True)

    def run(self, x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """Return for each token the sum of its experts' outputs; see ``run_experts``."""
        chosen_TK = self._positions(chosen_TK)
        if self._tokens is None:
            return self._run(x_TD, chosen_TK, gates_TK)
        start, stop = Pieces.at(self._tokens.rank, self._tokens.size).span(len(x_TD))
        own = self._run(own_rows(x_TD, self._tokens), chosen_TK[start:stop], own_rows(gates_TK, self._tokens))
        return join_rows(own, self._tokens, len(x_TD))

    def _positions(self, chosen_TK: Tensor) -> Tensor:
        """Return the choices as positions in the order of experts, from 0 on."""
        if self._order == (*range(self._num_experts),):
            return chosen_TK
        if chosen_TK.numel() and int(chosen_TK.max()) >= self._num_experts:
            return chosen_TK  # order_by_expert raises
        positions = torch.tensor(self._order, device=chosen_TK.device).argsort()
        return torch.where(chosen_TK < 0, chosen_TK, positions[chosen_TK.clamp(min=0)])

    def serve(self, link: Tensor) -> Tensor:
        """Run the experts on other actors' tokens, on an actor without tokens.

        The backward of the returned tensor runs the backward of the experts.

        Args:
            link: No rows (0, 1), from the previous call, which chains the backwards of calls in order.

        Returns:
            No rows (0, 1).
        """
        asked, width = self._asked([0] * self._num_experts, 0)
        return self._exchanged_outputs(link.expand(0, width), asked)[:, :1]

    def _run(self, x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor) -> Tensor:
        if self.most_rows is not None and not self._most and len(self._holders) == self._group.size:
            return run_padded(x_TD, chosen_TK, gates_TK, self._num_experts, self.most_rows, self._padded_outputs)
        order = order_by_expert(chosen_TK, self._num_experts, tokens=len(x_TD))
        rows_ND, (asked, _) = spread(x_TD, order), self._asked(order.counts, x_TD.shape[1])
        shadows = self._shadows(asked, rows_ND) if self._most else ()
        made_ND = self._with_shadows(rows_ND, asked, shadows) if shadows else self._exchanged_outputs(rows_ND, asked)
        return combine(made_ND, gates_TK, order)

    def _exchanged_outputs(self, rows_ND: Tensor, asked: Tensor) -> Tensor:
        """Return the experts' outputs for this actor's rows.

        Args:
            rows_ND: The rows, in the order of their experts.
            asked: Number of rows by actor and expert (actors, E).
        """
        if self._rounds > 1:
            return self._outputs_in_rounds(rows_ND, asked)
        there, here = self._splits(asked)
        came_ND = all_to_all_rows(self.anchored(rows_ND), self._group, there, here)
        made_ND = self._computed(came_ND, asked[:, self._own]) if len(self) else came_ND
        return all_to_all_rows(made_ND, self._group, here, there)

    def _padded_outputs(self, rows_ND: Tensor) -> Tensor:
        """Return the experts' outputs for as many rows of this actor for each expert (N, D)."""
        size, each, width = self._group.size, len(self), rows_ND.shape[1]
        splits = [len(rows_ND) // size] * size
        came_ND = all_to_all_rows(self.anchored(rows_ND), self._group, splits, splits)
        by_expert = came_ND.view(size, each, -1, width).transpose(0, 1).flatten(1, 2)
        made = torch.stack([expert(part) for expert, part in zip(self.values(), by_expert, strict=True)])
        made_ND = made.unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 2)
        return all_to_all_rows(made_ND, self._group, splits, splits)

    def _outputs_in_rounds(self, rows_ND: Tensor, asked: Tensor) -> Tensor:
        """Return the same as ``_outputs``, computed by groups of each actor's experts."""
        each, counts = self._num_experts // len(self._holders), asked[self._group.rank].tolist()
        spans = [Pieces.at(number, self._rounds).span(each) for number in range(self._rounds)]
        of_rounds = [[i for i in range(len(counts)) if start <= i % each < stop] for start, stop in spans]
        asked_of = [torch.zeros_like(asked).index_copy(1, own, asked[:, own]) for own in map(torch.tensor, of_rounds)]
        splits = [self._splits(of_round) for of_round in asked_of]
        trips = [(Trip(self._group, there, here), Trip(self._group, here, there)) for there, here in splits]

        def compute(number: int, came_ND: Tensor) -> Tensor:
            return self._computed(came_ND, asked[:, self._own], spans[number]) if len(self) else came_ND

        parts = self.anchored(rows_ND).split(counts)
        made: dict[int, Tensor] = {}
        sent = [torch.cat([parts[expert] for expert in some]) for some in of_rounds]
        for some, back_ND in zip(of_rounds, in_rounds(sent, trips, compute), strict=True):
            made |= zip(some, back_ND.split([counts[expert] for expert in some]), strict=True)
        return torch.cat([made[expert] for expert in range(len(counts))])

    def _splits(self, asked: Tensor) -> tuple[list[int], list[int]]:
        """Return the number of rows to each actor, and from each actor."""
        group, holders = self._group, self._holders
        by_holder = asked[group.rank].view(len(holders), -1).sum(1).tolist()
        there = [*[0] * holders.start, *by_holder, *[0] * (group.size - holders.stop)]
        return there, asked[:, self._own].sum(1).tolist()

    def _shadows(self, asked: Tensor, rows_ND: Tensor) -> tuple[int, ...]:
        """Choose the experts to shadow, and write the choice to the record."""
        weights = [*next(iter(self.values())).parameters()]
        count, each = sum(weight.numel() for weight in weights), sum(map(nbytes, weights))
        row = rows_ND.shape[1] * rows_ND.element_size()
        choice = Shadowing(self._most, count, row, each).choose(asked.view(*[self._group.size] * 2, -1))
        if self.record is not None and self._group.rank == 0:
            numbers = tuple(self._order[slot] for slot in choice.slots)
            self.record.shadows(self.name, self._num_experts, choice._replace(slots=numbers))
        return choice.slots

    def _with_shadows(self, rows_ND: Tensor, asked: Tensor, shadows: tuple[int, ...]) -> Tensor:
        """Compute rows of shadowed experts on this actor, and exchange all other rows.

        Args:
            rows_ND: The rows of this actor's tokens, in the order of the experts.
            asked: Number of rows by actor and expert (actors, E).
            shadows: Positions of the shadowed experts.

        Returns:
            The experts' outputs (N, D), in the order of the rows.
        """
        group, counts = self._group, asked[self._group.rank].tolist()
        parts, asked = rows_ND.split(counts), asked.clone()
        asked[:, list(shadows)] = 0
        away = [expert for expert in range(len(counts)) if expert not in shadows]
        there, here = self._splits(asked)
        gone_ND = self.anchored(torch.cat([rows_ND[:0], *(parts[expert] for expert in away)]))
        visits = [(expert // len(self), self._weights_of(expert, rows_ND)) for expert in shadows]
        came_ND, weights = dispatch(gone_ND, group, there, here, visits)
        back_ND = all_to_all_rows(self._computed(came_ND, asked[:, self._own]), group, here, there)
        made = dict(zip(away, back_ND.split([counts[expert] for expert in away]), strict=True))
        guest = self._guest[0].train(self.training)
        names = [name for name, _ in guest.named_parameters()]
        for expert, theirs in zip(shadows, weights, strict=True):
            made[expert] = functional_call(guest, dict(zip(names, theirs, strict=True)), (parts[expert],))
        return torch.cat([made[expert] for expert in range(len(counts))])

    def _weights_of(self, position: int, like: Tensor) -> tuple[Tensor, ...]:
        """Return an expert's weights if this actor has it, else tensors of their shapes with undefined values."""
        if (number := str(self._order[position])) in self:
            return tuple(self[number].parameters())
        alike = next(iter(self.values())).parameters()
        return tuple(torch.empty(weight.shape, dtype=weight.dtype, device=like.device) for weight in alike)

    @property
    def _own(self) -> slice:
        """The numbers of this actor's experts."""
        if not len(self):
            return slice(0, 0)
        return slice(*Pieces.at(self._group.rank - self._holders.start, len(self._holders)).span(self._num_experts))

    def _asked(self, counts: Sequence[int], width: int) -> tuple[Tensor, int]:
        """Return the number of rows by actor and expert (actors, E), and the width of a row.

        Args:
            counts: Number of this actor's rows for each expert.
            width: The width of its rows; 0 if it never has any.
        """
        own = torch.tensor([*counts, width])
        gathered = own.new_empty(self._group.size * len(own))
        self._group.host.all_gather(gathered, own).wait()
        gathered = gathered.view(self._group.size, -1)
        return gathered[:, :-1], int(gathered[:, -1].max())

    def _computed(self, came_ND: Tensor, asked: Tensor, span: tuple[int, int] | None = None) -> Tensor:
        """Run this actor's experts, or those of a round.

        Args:
            came_ND: The received rows, sorted by sender, then by expert.
            asked: Number of rows by sender and expert (members, experts of this actor).
            span: The first of the experts to run, and the one after the last; None for all.

        Returns:
            The experts' outputs (N, D), in the order of the rows.
        """
        some = slice(*(span or (0, len(self))))
        asked = asked[:, some]
        senders, experts = asked.shape
        starts = (asked.flatten().cumsum(0) - asked.flatten()).view(senders, experts)
        runs = [
            torch.arange(start, start + count)
            for expert in range(experts)
            for start, count in zip(starts[:, expert].tolist(), asked[:, expert].tolist(), strict=True)
        ]
        by_expert = torch.cat(runs).to(came_ND.device, non_blocking=True)
        parts = came_ND.index_select(0, by_expert).split(asked.sum(0).tolist())
        made = torch.cat([expert(part) for expert, part in zip([*self.values()][some], parts, strict=True)])
        return made.index_select(0, by_expert.argsort())


def _without_weights(expert: nn.Module) -> nn.Module:
    """Return a copy of an expert whose parameters have no elements."""
    shell = deepcopy(expert)
    for module in shell.modules():
        for name in module._parameters:
            if module._parameters[name] is not None:
                module._parameters[name] = nn.Parameter(torch.empty(0, device="cpu"))
    return shell


def strip(layer: nn.Module) -> None:
    """Remove all weights and buffers except those of experts from a layer, in place, before it has values.

    Args:
        layer: The layer, or a container of layers, in which lists of experts are ``TokenExchange``.
    """
    experts = {id(part) for module in layer.modules() if isinstance(module, TokenExchange) for part in module.modules()}
    for module in layer.modules():
        if id(module) not in experts:
            module._parameters.clear()
            module._buffers.clear()


class ExpertsWithoutTokens(nn.Module):
    """The experts of a layer, with the same names as in the layer. Without experts, it returns its input.

    Each call serves one forward of the layer on the actors that have tokens: its lists of experts are called once each,
    in the order of their registration.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        found = {name: module for name, module in layer.named_modules() if isinstance(module, TokenExchange)}
        self._shards = tuple(found)
        for name, shard in found.items():
            *parents, last = name.split(".")
            at: nn.Module = self
            for parent in parents:
                if parent not in at._modules:
                    at.add_module(parent, nn.Module())
                at = at.get_submodule(parent)
            at.add_module(last, shard)

    def forward(self, link: Tensor) -> Tensor:
        """Run the experts on other actors' tokens. ``link`` (0, 1) is that of the previous layer; returns (0, 1)."""
        for name in self._shards:
            shard = self.get_submodule(name)
            assert isinstance(shard, TokenExchange)
            link = shard.serve(link)
        return link
