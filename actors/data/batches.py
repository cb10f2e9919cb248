"""The batches of a step: the inputs of the first stage and the targets of the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

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


Read: TypeAlias = Callable[[ProgramName, int, int, int], Values]  # of a program, step, microbatch and replica


def _one_document(program: ProgramName, step: int, microbatch: int, dp: int) -> Extents:
    return Extents()


@dataclass(frozen=True)
class BatchSource:
    """Batches as pure functions of (program, step, microbatch, dp), so any actor can read any batch in any order.

    Args:
        inputs: Returns the inputs of a microbatch, for the first stage.
        targets: Returns the targets of a microbatch, for the last stage.
        extents: Returns where documents and padding are in a microbatch.
    """

    inputs: Read
    targets: Read
    extents: Callable[[ProgramName, int, int, int], Extents] = _one_document


def _example_source(batches: ExampleBatches, *, packing: bool) -> BatchSource:
    """Return batches of examples, which share sequences if ``packing``."""
    cached = lru_cache(_MOST_CACHED)(batches.batch)

    def extents(*at: Any) -> Extents:
        return cached(*at)[2] if packing else cached(*at)[2]._replace(starts=None)

    return BatchSource(lambda *at: (cached(*at)[0],), lambda *at: (cached(*at)[1],), extents)


def function_source(spec: Batches) -> BatchSource:
    """Return batches from the user's own functions."""

    def pair(program: ProgramName, step: int, microbatch: int, dp: int) -> tuple[Values, Values]:
        fn = spec.fn if program == "train" else spec.validate
        if fn is None:
            raise ValueError("the run has no validation data: give Batches a validate function")
        return pair_of(fn(step, microbatch, dp))

    @lru_cache(_MOST_CACHED)  # every layer reads them
    def extents(*at: Any) -> Extents:
        return Extents() if spec.lengths is None else Extents(lengths=lengths_of(spec.lengths, *pair(*at)))

    return BatchSource(lambda *at: pair(*at)[0], lambda *at: pair(*at)[1], extents)


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


def context_source(source: BatchSource, tokens: Pieces) -> BatchSource:
    """Return the tokens of this context-parallel rank, of every input and target (B, S, ...) of another source.

    Args:
        source: Source of the whole sequences.
        tokens: The pieces of dim 1 that this rank holds.
    """

    def here(values: Values) -> Values:
        return _tokens_in(values, tokens, "mesh.cp")

    def extents(*at: Any) -> Extents:
        found = source.extents(*at)
        return found if found.starts is None else found._replace(starts=here((found.starts,))[0])

    return BatchSource(lambda *at: here(source.inputs(*at)), lambda *at: here(source.targets(*at)), extents)


def sliced_source(source: BatchSource, count: int) -> BatchSource:
    """Return slices of every input and target (B, S, ...) of another source, numbered across microbatches.

    Args:
        source: Source of the whole sequences.
        count: Number of slices of a microbatch, along the sequence.
    """

    def sliced(read: Read) -> Read:
        def of_slice(program: ProgramName, step: int, number: int, dp: int) -> Values:
            microbatch, index = divmod(number, count)
            return _tokens_in(read(program, step, microbatch, dp), Pieces.at(index, count), "token_slices")

        return of_slice

    return BatchSource(sliced(source.inputs), sliced(source.targets))


def _tokens_in(values: Values, pieces: Pieces, setting: str) -> Values:
    """Return some pieces of each of a batch's tensors along the sequence, which ``setting`` divides."""
    for value in values:
        if value.dim() < 2 or value.shape[1] % pieces.count:
            raise ValueError(
                f"a batch has a tensor {list(value.shape)}: with {setting} dim 1 is the sequence, "
                f"and must be a multiple of {pieces.count}"
            )
    return tuple(pieces.take(value, 1).contiguous() for value in values)


def cast_source(source: BatchSource, dtype: torch.dtype, *, targets: bool = False) -> BatchSource:
    """Return another source's batches with floating-point inputs in the dtype in which the layers compute.

    Args:
        source: The source.
        dtype: The dtype.
        targets: Whether floating-point targets are cast, too.
    """

    def cast(read: Read) -> Read:
        return lambda *at: cast_floating(read(*at), dtype)

    return replace(source, inputs=cast(source.inputs), targets=cast(source.targets) if targets else source.targets)


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
        return function_source(data)
    assert model.seq is not None, "text needs a model with a sequence length"
    if isinstance(data, Examples):
        examples = ExampleBatches(data, model.seq, micro_batch_size, microbatches, num_dp, seed)
        return _example_source(examples, packing=data.packing)
    # windows of tokens (B, S) int64, and the same windows shifted by one token
    text = TokenBatches(open_corpus(data, model.seq), model.seq, micro_batch_size, microbatches, num_dp, seed)
    return BatchSource(lambda *at: (text.tokens(*at),), lambda *at: (text.labels(*at),))


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
