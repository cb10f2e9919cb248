"""Reports of the user's routers: the load of each expert, and scores that are not finite."""

from __future__ import annotations

from torch import Tensor, nn

from raypar.actors.expert_parallel.experts import DROPPED
from raypar.actors.expert_parallel.losses import load_of
from raypar.actors.expert_parallel.record import Routed


class RouterLoad(nn.Module, Routed):
    """A module that reports the load of each expert, from inside a user's layer with a router.

    The load is in ``report.loads``, under the module's logical name. Outside of a run nothing is reported.

    Args:
        num_experts: Number of experts.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, chosen_TK: Tensor, scores: Tensor | None = None, dropped_TK: Tensor | None = None) -> Tensor:
        """Report the choices of a microbatch.

        Args:
            chosen_TK: The experts of each token, int64; -1 for no choice, which is not counted.
            scores: The router's scores, of any shape: if one is NaN or infinite, the step's error names this module.
            dropped_TK: Which choices are over the capacity of their expert, bool; None if none are.

        Returns:
            The choices, with -1 for dropped ones: the argument of ``rp.run_experts``.
        """
        kept_TK = chosen_TK if dropped_TK is None else chosen_TK.masked_fill(dropped_TK, DROPPED)
        if self.record is not None:
            asked_E = load_of(chosen_TK, self.num_experts)
            self.record.tokens(self.name, asked_E, asked_E - load_of(kept_TK, self.num_experts))
            if scores is not None:
                self.record.scores(self.name, scores)
        return kept_TK

    def extra_repr(self) -> str:
        """Return what ``print`` shows of the module."""
        return str(self.num_experts)
