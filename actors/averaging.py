"""The mean over a step's tokens, made of the means over its microbatches."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from raypar.actors.batches import BatchSource
from raypar.actors.models.model import Model


class TokenMean:
    """What each microbatch weighs in the step's loss, known before anybody else has counted.

    A microbatch's loss is a mean over its ``count`` tokens, so it should weigh count / (tokens of the step). No replica
    knows that total during its backwards. It takes the total as expected: every microbatch as long as the first one of
    the run. What is then still wrong is made good by ``correction``, usually 1, before the update.

    num_microbatches  of one replica
    num_dp            replicas
    """

    def __init__(self, model: Model, source: BatchSource, num_microbatches: int, num_dp: int) -> None:
        self._model, self._source = model, source
        self._num_microbatches, self._num_dp = num_microbatches, num_dp

    @cached_property
    def expected(self) -> int:
        """The tokens of one replica in a step, if all microbatches are like the first one of the run."""
        reference = self._model.count(self._source.targets("train", 0, 0, 0))
        return self._num_microbatches * max(1, reference)

    def weight(self, count: int) -> Tensor:
        """A microbatch's share of the step's loss, a scalar; with equal counts it is 1 / (microbatches of the step)."""
        return torch.tensor(count / (self.expected * self._num_dp))


def correction(tokens: float, expected: float) -> float:
    """What the gradients of a step have to be multiplied by, rounded to fp32: expected over true number of tokens."""
    return float(torch.tensor(expected / tokens)) if tokens else 1.0
