"""Checks of the first passes of a stage, which cost too much to repeat for every microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

from torch import Tensor

from raypar.actors.autograd.forward_state import FrozenWrites
from raypar.actors.data_parallel.stage_weights import StageWeights
from raypar.actors.models.meta_guard import MetaGuard

Work = Literal["train", "eval", "backward"]


class FirstTime:
    """Guards the first forward in training, the first in evaluation and the first backward; checks the first loss.

    Args:
        writes: Records writes into frozen parameters.
        is_deferred: Whether the layers were built without values, so that some of their tensors may have none yet.
        weights: The stage's weights, if they are sharded over replicas; else None.
        check_loss: Called with the first loss; raises ValueError if it is computed from only a part of the last layer's
            outputs. None if there is nothing to check.
    """

    def __init__(
        self,
        writes: FrozenWrites,
        *,
        is_deferred: bool,
        weights: StageWeights | None,
        check_loss: Callable[[Tensor], None] | None,
    ) -> None:
        self._is_deferred, self._weights, self._check_loss = is_deferred, weights, check_loss
        self._writes = writes
        self._left: set[Work] = {"train", "eval", "backward"}
        self._has_loss = False

    @contextmanager
    def guarded(self, what: Work) -> Iterator[None]:
        """Guard the first pass of a kind against meta tensors and unusual uses of sharded weights.

        In the first forward in training, also record which frozen parameters it writes into.
        """
        is_first = what in self._left
        self._left.discard(what)
        with (
            MetaGuard() if is_first and self._is_deferred else nullcontext(),
            self._weights.guarded() if is_first and self._weights is not None else nullcontext(),
            self._writes if is_first and what == "train" and self._writes.is_needed else nullcontext(),
        ):
            yield

    def check(self, loss: Tensor, *, learns: Callable[[], bool]) -> None:
        """Check the first loss of a training step.

        Args:
            loss: The loss.
            learns: Returns whether it must have a gradient, because an input or a weight of the stage needs one.

        Raises:
            ValueError: It has no gradient, or is computed from only a part of the outputs.
        """
        if self._has_loss:
            return
        if learns() and not loss.requires_grad:
            raise ValueError(
                "the loss has no gradient: compute it from the last layer's output, without detach or no_grad"
            )
        if self._check_loss is not None:
            self._check_loss(loss)
        self._has_loss = True
