"""What goes into a step: the inputs of its first stage and the targets of its last."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from raypar.actors.data.token_batches import TokenBatches, open_corpus
from raypar.actors.models.base import Model
from raypar.actors.sharding import Portion
from raypar.actors.specs.data import Batches, Text
from raypar.actors.specs.model import GPT, Layers, Llama
from raypar.actors.specs.types import ProgramName
from raypar.actors.tensors import Values, as_values


class BatchSource(Protocol):
    """Batches as pure functions of (step, microbatch, dp): any actor may ask for any of them, in any order."""

    def inputs(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values: ...

    def targets(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values: ...


class TextSource:
    """Windows of tokens (B, S) int64, and the same windows one token later."""

    def __init__(self, batches: TokenBatches) -> None:
        self._batches = batches

    def inputs(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        read = self._batches.train_tokens if program == "train" else self._batches.val_tokens
        return (read(step, microbatch, dp),)

    def targets(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        read = self._batches.train_labels if program == "train" else self._batches.val_labels
        return (read(step, microbatch, dp),)


class FunctionSource:
    """The user's own functions."""

    def __init__(self, spec: Batches) -> None:
        self._spec = spec

    def inputs(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        return as_values(self._pair(program, step, microbatch, dp)[0])

    def targets(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        return as_values(self._pair(program, step, microbatch, dp)[1])

    def _pair(self, program: ProgramName, step: int, microbatch: int, dp: int) -> tuple[object, object]:
        fn = self._spec.fn if program == "train" else self._spec.validate
        if fn is None:
            raise ValueError("the run has no validation data: give Batches a validate function")
        pair = fn(step, microbatch, dp)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"a batch function must return (inputs, targets), it returned {type(pair).__name__}")
        return pair[0], pair[1]


class ContextSource:
    """Of every input and target (B, S, ...) of another source the tokens that are here."""

    def __init__(self, source: BatchSource, tokens: Portion) -> None:
        self._source, self._tokens = source, tokens

    def inputs(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        return self._here(self._source.inputs(program, step, microbatch, dp))

    def targets(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        return self._here(self._source.targets(program, step, microbatch, dp))

    def _here(self, values: Values) -> Values:
        for value in values:
            if value.dim() < 2 or value.shape[1] % self._tokens.of:
                raise ValueError(
                    f"a batch has a tensor {list(value.shape)}: with mesh.cp dim 1 is the sequence, "
                    f"and must be a multiple of {self._tokens.of}"
                )
        return tuple(self._tokens.take(value, 1).contiguous() for value in values)


def batch_source(
    data: Text | Batches,
    model: GPT | Llama | Layers,
    micro_batch_size: int,
    microbatches: int,
    num_dp: int,
    seed: int,
) -> BatchSource:
    """The batches of a run; ``microbatches`` are those of one data-parallel replica."""
    if isinstance(data, Batches):
        return FunctionSource(data)
    assert model.seq is not None, "text needs a model with a sequence length"
    corpus = open_corpus(data)
    return TextSource(TokenBatches(corpus, model.seq, micro_batch_size, microbatches, num_dp, seed))


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
