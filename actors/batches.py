"""What goes into a step: the inputs of its first stage and the targets of its last."""

from __future__ import annotations

from typing import Protocol

from raypar.actors.data import TokenBatches, open_corpus
from raypar.actors.models.model import Values, as_values
from raypar.actors.plan import ProgramName
from raypar.actors.portion import Portion
from raypar.actors.specs import GPT, Batches, Layers, Llama, Text


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
