"""The batches of a step: the inputs of the first stage and the targets of the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from raypar.actors.data.examples.example_batches import ExampleBatches
from raypar.actors.data.text.token_batches import TokenBatches, open_corpus
from raypar.actors.extents import Extents
from raypar.actors.models.base import Model
from raypar.actors.sharding import Pieces
from raypar.actors.specs.data import Batches, Examples, Text
from raypar.actors.specs.model import GPT, Layers, Llama
from raypar.actors.specs.types import ProgramName
from raypar.actors.tensors import Values, as_values, cast_floating

_MOST_CACHED = 16  # microbatches: an actor reads the inputs, targets and extents of each in separate calls


class BatchSource(Protocol):
    """Batches as pure functions of (step, microbatch, dp), so any actor can read any batch in any order."""

    def inputs(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        """Return the inputs of a microbatch, for the first stage."""

    def targets(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        """Return the targets of a microbatch, for the last stage."""

    def extents(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Extents:
        """Return where documents and padding are in a microbatch."""


class TextSource:
    """Batches of text.

    The inputs are windows of tokens (B, S) int64, the targets the same windows shifted by one token.
    """

    def __init__(self, batches: TokenBatches) -> None:
        self._batches = batches

    def inputs(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        read = self._batches.train_tokens if program == "train" else self._batches.val_tokens
        return (read(step, microbatch, dp),)

    def targets(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        read = self._batches.train_labels if program == "train" else self._batches.val_labels
        return (read(step, microbatch, dp),)

    def extents(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Extents:
        return Extents()


class ExampleSource:
    """Batches of examples.

    Args:
        batches: The batches.
        packing: Whether examples share sequences.
    """

    def __init__(self, batches: ExampleBatches, *, packing: bool) -> None:
        self._batches, self._packing = batches, packing
        self._cached = lru_cache(_MOST_CACHED)(self._batches.batch)

    def inputs(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        return (self._cached(program, step, microbatch, dp)[0],)

    def targets(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        return (self._cached(program, step, microbatch, dp)[1],)

    def extents(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Extents:
        extents = self._cached(program, step, microbatch, dp)[2]
        return extents if self._packing else extents._replace(starts=None)


class FunctionSource:
    """Batches from the user's own functions."""

    def __init__(self, spec: Batches) -> None:
        self._spec = spec
        self._cached_extents = lru_cache(_MOST_CACHED)(self._extents)  # every layer reads them

    def inputs(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        return self._pair(program, step, microbatch, dp)[0]

    def targets(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        return self._pair(program, step, microbatch, dp)[1]

    def extents(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Extents:
        return Extents() if self._spec.lengths is None else self._cached_extents(program, step, microbatch, dp)

    def _extents(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Extents:
        assert self._spec.lengths is not None
        inputs, targets = self._pair(program, step, microbatch, dp)
        return Extents(lengths=lengths_of(self._spec.lengths, inputs, targets))

    def _pair(self, program: ProgramName, step: int, microbatch: int, dp: int) -> tuple[Values, Values]:
        fn = self._spec.fn if program == "train" else self._spec.validate
        if fn is None:
            raise ValueError("the run has no validation data: give Batches a validate function")
        return pair_of(fn(step, microbatch, dp))


@dataclass(frozen=True)
class Renumbered:
    """A user's batch function in a run with another number of replicas than the function was written for.

    Microbatches keep their numbers within the whole step, so the function generates the same ones.

    Args:
        fn: The function of (step, microbatch, dp).
        made_for: Number of replicas that the function was written for.
        dp: Number of replicas of the run.
    """

    fn: Callable[[int, int, int], tuple[Any, Any]]
    made_for: int
    dp: int

    def __call__(self, step: int, microbatch: int, dp: int) -> tuple[Any, Any]:
        """Return the inputs and targets of a microbatch."""
        return self.fn(step, *divmod(microbatch * self.dp + dp, self.made_for))


def pair_of(batch: object) -> tuple[Values, Values]:
    """Return the inputs and targets that a user's batch function has returned. Raises TypeError with all faults."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        of_many = f" of {len(batch)}" if isinstance(batch, tuple) else ""
        raise TypeError(f"a batch function must return (inputs, targets), it returned {type(batch).__name__}{of_many}")
    found, wrong = list[Values](), list[str]()
    for what, values in zip(("inputs", "targets"), batch, strict=True):
        try:
            found.append(as_values(values, f"as {what} a batch function"))
        except TypeError as error:
            wrong.append(str(error))
    if wrong:
        raise TypeError("; ".join(wrong))
    return found[0], found[1]


class LengthError(ValueError):
    """The user's ``lengths`` function returned invalid lengths of a batch's sequences."""


def lengths_of(fn: Callable[..., object], inputs: Values, targets: Values) -> Tensor:
    """Return how many tokens each sequence of a microbatch has before its padding, (B,) int64.

    Args:
        fn: The user's function of the inputs and the targets, each a tensor, or a tuple of several.
        inputs: The inputs, of which the first is (B, S).
        targets: The targets.

    Raises:
        LengthError: The function returned anything but a length of 0 to S for each sequence.
    """
    found = fn(*(values if len(values) > 1 else values[0] for values in (inputs, targets)))
    batch, seq = inputs[0].shape[:2]
    if not isinstance(found, Tensor) or found.dtype != torch.int64 or found.shape != (batch,):
        shown = f"{list(found.shape)} {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        raise LengthError(f"data.lengths returned {shown}: return a tensor [{batch}] int64, a length for each sequence")
    if bool(((found < 0) | (found > seq)).any()):
        raise LengthError(f"data.lengths returned {found.tolist()}: a length is 0 to {seq}, the tokens of a sequence")
    return found


class ContextSource:
    """The tokens of this context-parallel rank, taken from every input and target (B, S, ...) of another source.

    Args:
        source: Source of the whole sequences.
        tokens: The pieces of dim 1 that this rank holds.
    """

    def __init__(self, source: BatchSource, tokens: Pieces) -> None:
        self._source, self._tokens = source, tokens

    def inputs(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        return self._here(self._source.inputs(program, step, microbatch, dp))

    def targets(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        return self._here(self._source.targets(program, step, microbatch, dp))

    def extents(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Extents:
        found = self._source.extents(program, step, microbatch, dp)
        return found if found.starts is None else found._replace(starts=self._here((found.starts,))[0])

    def _here(self, values: Values) -> Values:
        for value in values:
            if value.dim() < 2 or value.shape[1] % self._tokens.count:
                raise ValueError(
                    f"a batch has a tensor {list(value.shape)}: with mesh.cp dim 1 is the sequence, "
                    f"and must be a multiple of {self._tokens.count}"
                )
        return tuple(self._tokens.take(value, 1).contiguous() for value in values)


class SlicedSource:
    """Slices of every input and target (B, S, ...) of another source along the sequence, numbered across microbatches.

    Args:
        source: Source of the whole sequences.
        count: Number of slices of a microbatch.
    """

    def __init__(self, source: BatchSource, count: int) -> None:
        self._source, self._count = source, count

    def inputs(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        return self._slice(self._source.inputs(program, step, microbatch // self._count, dp), microbatch)

    def targets(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        return self._slice(self._source.targets(program, step, microbatch // self._count, dp), microbatch)

    def extents(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Extents:
        return Extents()

    def _slice(self, values: Values, number: int) -> Values:
        for value in values:
            if value.dim() < 2 or value.shape[1] % self._count:
                raise ValueError(
                    f"a batch has a tensor {list(value.shape)}: with token_slices dim 1 is the sequence, "
                    f"and must be a multiple of {self._count}"
                )
        piece = Pieces.at(number % self._count, self._count)
        return tuple(piece.take(value, 1).contiguous() for value in values)


class CastSource:
    """Another source's batches with floating-point inputs in the dtype in which the layers compute.

    Args:
        source: The source.
        dtype: The dtype.
        targets: Whether floating-point targets are cast, too.
    """

    def __init__(self, source: BatchSource, dtype: torch.dtype, *, targets: bool = False) -> None:
        self._source, self._dtype, self._targets = source, dtype, targets

    def inputs(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        return cast_floating(self._source.inputs(program, step, microbatch, dp), self._dtype)

    def targets(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Values:
        targets = self._source.targets(program, step, microbatch, dp)
        return cast_floating(targets, self._dtype) if self._targets else targets

    def extents(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Extents:
        return self._source.extents(program, step, microbatch, dp)


def batch_source(
    data: Text | Batches | Examples,
    model: GPT | Llama | Layers,
    micro_batch_size: int,
    microbatches: int,
    num_dp: int,
    seed: int,
) -> BatchSource:
    """Create the source of a run's batches.

    Args:
        data: The user's text, examples or functions.
        model: The model, whose ``seq`` is the window length of text.
        micro_batch_size: Sequences per microbatch.
        microbatches: Microbatches per step of one data-parallel replica.
        num_dp: Data-parallel replicas.
        seed: Seed of the order of text windows.

    Raises:
        ValueError: The text, or an example, has faults.
    """
    if isinstance(data, Batches):
        return FunctionSource(data)
    assert model.seq is not None, "text needs a model with a sequence length"
    if isinstance(data, Examples):
        batches = ExampleBatches(data, model.seq, micro_batch_size, microbatches, num_dp, seed)
        return ExampleSource(batches, packing=data.packing)
    corpus = open_corpus(data, model.seq)
    return TextSource(TokenBatches(corpus, model.seq, micro_batch_size, microbatches, num_dp, seed))


class TokenMean:
    """The weight of each microbatch in the step's loss, known before all tokens of the step are counted.

    The loss of a microbatch is a mean over its ``count`` tokens, so its weight should be count / (tokens of the step).
    No replica knows that total during its backwards. So the total is estimated as if every microbatch had as many
    tokens as the first one of the run, and ``correction``, usually 1, fixes the error before the update.

    Args:
        model: Counts the tokens of a microbatch's targets.
        source: The batches.
        num_microbatches: Microbatches per step of one replica.
        num_dp: Data-parallel replicas.
    """

    def __init__(self, model: Model, source: BatchSource, num_microbatches: int, num_dp: int) -> None:
        self._model, self._source = model, source
        self._num_microbatches, self._num_dp = num_microbatches, num_dp

    @cached_property
    def expected(self) -> int:
        """Tokens of one replica in a step, if all microbatches are like the first one of the run."""
        reference = self.count(self._source.targets("train", 0, 0, 0))
        return self._num_microbatches * max(1, reference)

    def count(self, targets: Values) -> int:
        """Return the number of tokens of a microbatch's targets."""
        return self._model.count(targets)

    def weight(self, count: int, scale: float = 1.0) -> Tensor:
        """Return the weight of a microbatch in the loss, a scalar tensor.

        With equal counts and a scale of 1 it is 1 / (microbatches of the step, over all replicas).

        Args:
            count: Number of tokens of the microbatch.
            scale: Factor of the loss.
        """
        return torch.tensor(count / (self.expected * self._num_dp) * scale)

    def auxiliary(self, scale: float = 1.0) -> float:
        """Return the weight of a microbatch's auxiliary losses, which are means over the microbatches of the step.

        Divide it by ``correction`` where the step's gradients are multiplied by that.

        Args:
            scale: Factor of the loss.
        """
        return scale / (self._num_microbatches * self._num_dp)


def correction(tokens: float, expected: float) -> float:
    """Return the factor for the gradients of a step.

    Expected over true number of tokens, rounded to fp32; 0 for a step without tokens, which changes no weight.
    """
    return float(torch.tensor(expected / tokens)) if tokens else 0.0
