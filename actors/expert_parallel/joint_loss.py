"""The load-balancing loss over the tokens of all layers together, as transformers computes it.

It is E times the sum of f_e P_e, where f_e is the mean number of choices of expert e and P_e the mean of its
probabilities, both over the tokens of all layers of a microbatch. The gradient of a layer's probabilities is f, which
is complete when the last layer has chosen. So f is read in the backward, after all forwards of the microbatch.

Shapes: T tokens of this actor, E experts, K choices of a token.

Source: transformers, ``load_balancing_loss_func`` of Mixtral and Qwen3-MoE; Fedus et al. 2021, equations 4 to 6.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raypar.actors.autograd.apply_function import apply_function
from raypar.actors.expert_parallel.losses import Sums, counted, load_of, num_counted


class LoadTally:
    """The sums over the layers of a microbatch so far.

    Args:
        num_experts: Number E of experts of each layer.
        like: A tensor of the dtype and on the device of the sums.
    """

    def __init__(self, num_experts: int, like: Tensor) -> None:
        self._choices, self._probs = (like.new_zeros(num_experts) for _ in range(2))
        self._tokens, self.loss = like.new_zeros(()), like.new_zeros(())

    def add(self, sums: Tensor) -> Tensor:
        """Add a layer; return the increase of the loss.

        Args:
            sums: The choices of each expert, the sum of each expert's probabilities, the number of tokens: (2 E + 1,).
        """
        choices_E, probs_E, tokens_1 = sums.split((len(self._choices), len(self._choices), 1))
        self._choices, self._probs = self._choices + choices_E, self._probs + probs_E
        self._tokens, before = self._tokens + tokens_1[0], self.loss
        self.loss = self.slopes() @ self._probs
        return self.loss - before

    def slopes(self) -> Tensor:
        """Return the derivative of the loss by the sum of each expert's probabilities, (E,)."""
        return len(self._choices) * self._choices / self._tokens.clamp(min=1) ** 2


class JointLoss:
    """The loss of the microbatches of an actor, shared by its layers of experts.

    The forwards of a microbatch come in the order of the layers. A recomputed layer is not added again.
    """

    def __init__(self) -> None:
        self._tallies: dict[int | None, LoadTally] = {}  # by microbatch

    def of_layer(
        self,
        probs_TE: Tensor,
        chosen_TK: Tensor,
        microbatch: int | None,
        sums: Sums,
        real_T: Tensor | None = None,
        *,
        is_first: bool,
        again: bool,
    ) -> Tensor:
        """Return a scalar: the increase of a microbatch's loss by a layer.

        Its gradient is that of the whole loss with respect to the layer's probabilities.

        Args:
            probs_TE: Probabilities of the experts, fp32.
            chosen_TK: The experts that each token chose, before any is dropped; -1 for those of padding.
            microbatch: Number of the microbatch.
            sums: Sums over the actors that have tokens of the same sequences.
            real_T: Which tokens are not padding, bool; None if all are.
            is_first: Whether it is the first layer with experts.
            again: Whether the forward is a recomputation.
        """
        num_experts = probs_TE.shape[1]
        probs_E = counted(probs_TE, real_T).sum(0)
        if again:
            return apply_function(_Late, probs_E, probs_E.new_zeros(()), self._tallies[microbatch])
        if is_first:
            self._tallies[microbatch] = LoadTally(num_experts, probs_E)
        tally = self._tallies[microbatch]
        with torch.no_grad():
            load_E = load_of(chosen_TK, num_experts).to(probs_E)
            own = torch.cat((load_E, probs_E, num_counted(probs_TE, real_T)))
            more = tally.add(sums(own))
        return apply_function(_Late, probs_E, more, tally)


class _Late(torch.autograd.Function):
    """A scalar whose gradient is read from a tally in the backward, when all layers have counted."""

    @staticmethod
    def forward(ctx: Any, probs_E: Tensor, value: Tensor, tally: LoadTally) -> Tensor:
        ctx.tally = tally
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        tally: LoadTally = ctx.tally
        return gradient * tally.slopes(), None, None
