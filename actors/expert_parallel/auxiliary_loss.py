"""Auxiliary losses in the user's layers."""

from __future__ import annotations

from torch import Tensor, nn

from raypar.actors.expert_parallel.record import Routed, attach_loss


class AuxiliaryLoss(nn.Module, Routed):
    """A module that adds a loss to the objective of the step, from inside a layer.

    The objective is the loss of the model, plus ``weight`` times each auxiliary loss, as a mean over the step's
    microbatches and all replicas. Outside of a run nothing is added.

    Args:
        kind: Name of the loss in reports.
        weight: Its coefficient.

    Example:
        ``h = self.penalty(self.up(x).relu(), loss)`` in a layer with ``self.penalty = rp.AuxiliaryLoss("sparsity",
        1e-3)``.
    """

    def __init__(self, kind: str, weight: float = 1.0) -> None:
        super().__init__()
        self.kind, self.weight, self.adds_losses = kind, weight, True

    def forward(self, x: Tensor, loss: Tensor) -> Tensor:
        """Add a loss to the objective.

        Args:
            x: A tensor of the layer that the loss of the model depends on; of any shape and floating dtype.
            loss: The auxiliary loss of this microbatch, one number, best computed in fp32 and as a mean over it.

        Returns:
            ``x``. Use it instead of the argument: its backward gives the loss its gradient.

        Raises:
            ValueError: The loss is not one floating number.
        """
        if loss.numel() != 1 or not loss.is_floating_point():
            raise ValueError(
                f"auxiliary loss {self.kind!r} must be one floating number, it is {list(loss.shape)} {loss.dtype}: "
                "return the mean over the microbatch"
            )
        added = self.weight * loss.reshape(()).float()
        if self.record is not None:
            self.record.loss(self.name, self.kind, added)
        return attach_loss(x, added, self.record)

    def extra_repr(self) -> str:
        """Return what ``print`` shows of the module."""
        return f"{self.kind!r}, weight={self.weight:g}"
