"""Batches of examples as pure functions of (step, microbatch, dp), packed into sequences.

A sequence consists of pieces: whole examples, or parts of texts that are longer than a sequence. Every token of an
example is in one sequence, as an input and, if it is learned, as the target of the token before it. A conversation that
is longer than a sequence is truncated. The pieces of a sequence are the same in all epochs; the order of sequences is
shuffled in each. Every set of examples has independent epochs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from raypar.actors.data.examples.example_sets import ExampleSet, example_sets
from raypar.actors.data.examples.mixing import mixed, shares_of
from raypar.actors.data.examples.packing import Int64s, Packed, one_per_sequence, pack_best_fit
from raypar.actors.data.text.text_files import TextError
from raypar.actors.data.text.token_batches import shuffled
from raypar.actors.data.tokenizers.tokenizer import Tokenizer, vocab_faults
from raypar.actors.extents import Extents
from raypar.actors.specs.data import Examples

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # of a target: the ignore_index of torch's losses over classes
_VAL_SEED = 0  # the order of validation examples does not depend on the run's seed


class Row(NamedTuple):
    """A sequence.

    Attributes:
        inputs: Token ids (S,).
        targets: The next token of each that is learned, else -100, (S,).
        starts: For each token, the position of the first token of its example, (S,).
        length: Number of tokens before the padding.
    """

    inputs: Int64s
    targets: Int64s
    starts: Int64s
    length: int


@dataclass(frozen=True, eq=False)
class ExamplePieces:
    """The pieces of some examples.

    Attributes:
        firsts: The position of each piece's first token, among all converted tokens.
        lengths: Number of tokens of each that are inputs; the token after these is the last target.
        cut: Number of conversations that are truncated.
        dropped: Number of examples without a learned token.
    """

    firsts: Int64s
    lengths: Int64s
    cut: int
    dropped: int


class ExampleSequences:
    """The sequences of a set of examples.

    Args:
        examples: The set.
        seq: Tokens of a sequence.
        packing: Whether examples share sequences.
    """

    def __init__(self, examples: ExampleSet, seq: int, *, packing: bool) -> None:
        self._from, self._seq = examples.converted, seq
        self.pieces = _pieces(examples, seq)
        lengths = self.pieces.lengths
        self._packed: Packed = pack_best_fit(lengths, seq) if packing else one_per_sequence(len(lengths))

    def __len__(self) -> int:
        return len(self._packed.ends)

    def row(self, number: int) -> Row:
        """Return a sequence. It is padded with token 0; the padding is a separate example without targets."""
        inputs, targets = np.zeros(self._seq, np.int64), np.full(self._seq, IGNORED, np.int64)
        starts, end = np.zeros(self._seq, np.int64), 0
        for piece in self._packed.of(number).tolist():
            first, length = int(self.pieces.firsts[piece]), int(self.pieces.lengths[piece])
            span = slice(end, end + length)
            inputs[span] = self._from.ids[first : first + length]
            following = self._from.ids[first + 1 : first + length + 1].astype(np.int64)
            targets[span] = np.where(self._from.loss_mask[first + 1 : first + length + 1], following, IGNORED)
            starts[span] = end
            end += length
        starts[end:] = end
        return Row(inputs, targets, starts, end)


class Mixture:
    """The sequences of one or more sets of examples, mixed by weights.

    Args:
        parts: The sequences of each set, by its path.
        weights: The weight of each set.

    Attributes:
        parts: These sequences.
        shares: Number of samples of each set in a block, (n,).
    """

    def __init__(self, parts: Mapping[str, ExampleSequences], weights: Sequence[float]) -> None:
        self.parts, self.shares = parts, shares_of(weights)
        self._sets = [*parts.values()]

    def __len__(self) -> int:
        """Return the number of sequences of all sets."""
        return sum(map(len, self._sets))

    def rows(self, samples: Int64s, seed: int, *, ordered: bool) -> list[Row]:
        """Return the sequences of some samples of a run.

        Args:
            samples: Their numbers, (n,).
            seed: Seed of the order.
            ordered: Whether the sequences of a set come in order, the same in each epoch; else each epoch shuffles
                them anew.
        """
        return [
            self._sets[part].row(_of_epoch(sample, len(self._sets[part]), seed, ordered=ordered))
            for part, sample in zip(*(found.tolist() for found in mixed(samples, self.shares, seed)), strict=True)
        ]


class ExampleBatches:
    """Batches of examples.

    Args:
        spec: The data.
        seq: Tokens of a sequence.
        micro_batch_size: Sequences of a microbatch.
        microbatches: Microbatches per step of one replica.
        num_dp: Replicas.
        seed: Seed of the order.

    Raises:
        TextError: The data has faults.
    """

    def __init__(
        self, spec: Examples, seq: int, micro_batch_size: int, microbatches: int, num_dp: int, seed: int
    ) -> None:
        self.train, self.val = open_sequences(spec, seq)
        self._size = micro_batch_size
        self._microbatches = microbatches
        self._num_dp = num_dp
        self._seed = seed

    def batch(self, program: str, step: int, microbatch: int, dp: int) -> tuple[Tensor, Tensor, Extents]:
        """Return the inputs and the targets of a microbatch, each (B, S) int64, and where documents and padding are.

        Args:
            program: "train"; any other program reads examples for validation.
            step: The step.
            microbatch: Index of the microbatch in the replica.
            dp: Index of the replica.
        """
        import torch  # imported here because the driver uses this module without torch

        first = ((step * self._microbatches + microbatch) * self._num_dp + dp) * self._size
        samples = np.arange(first, first + self._size)
        if program == "train":
            rows = self.train.rows(samples, self._seed, ordered=False)
        else:
            rows = self.val.rows(samples, _VAL_SEED, ordered=True)
        inputs, targets, starts, lengths = (torch.from_numpy(np.stack(parts)) for parts in zip(*rows, strict=True))
        return inputs, targets, Extents(starts, None if bool((lengths == inputs.shape[1]).all()) else lengths)


def open_sequences(spec: Examples, seq: int) -> tuple[Mixture, Mixture]:
    """Open the sequences for training and those for validation.

    Args:
        spec: The data.
        seq: Tokens of a sequence.

    Raises:
        TextError: All faults of the data.
    """

    def mixture(sets: Mapping[str, ExampleSet]) -> Mixture:
        parts = {path: ExampleSequences(one, seq, packing=spec.packing) for path, one in sets.items()}
        return Mixture(parts, [one.weight for one in sets.values()])

    train, val = map(mixture, example_sets(spec))
    return train, val


def example_faults(spec: Examples, seq: int, vocab: int, folder: str | None = None) -> list[str]:
    """Return all faults of the data for a model; [] if there are none. The first call converts.

    Args:
        spec: The data.
        seq: Tokens of a sequence.
        vocab: The model's token ids are 0 to vocab - 1.
        folder: The Hugging Face folder from which the model is read; None if there is none.
    """
    try:
        both = example_sets(spec)
    except TextError as error:
        return error.faults
    faults, unlearned = list[str](), dict[str, str]()  # the latter by path, whose examples are in both sets
    for one in (each for sets in both for each in sets.values()):
        facts = one.converted.facts
        faults += vocab_faults(one.setting, facts.max_id, facts.num_ids, vocab, folder)
        if one.setting not in unlearned and not len(_pieces(one, seq).firsts):
            unlearned[one.setting] = f"{one.setting}: {_unlearned(one, spec, seq)}"
    return list(dict.fromkeys([*faults, *unlearned.values()]))


def _of_epoch(sample: int, size: int, seed: int, *, ordered: bool) -> int:
    """Return the index of the set's sequence that a sample of the set is."""
    epoch, position = divmod(sample, size)
    return position if ordered else int(shuffled(np.array([position]), np.array([epoch]), size, seed)[0])


def _pieces(examples: ExampleSet, seq: int) -> ExamplePieces:
    """Cut examples into pieces of at most ``seq`` inputs, and drop pieces without a learned token."""
    firsts = list[int]()
    lengths = list[int]()
    cut = 0
    dropped = 0
    ends, learned = examples.converted.ends, examples.converted.loss_mask
    for example in examples.chosen.tolist():
        first, end = int(ends[example - 1]) if example else 0, int(ends[example])
        is_text = end - first > seq + 1 and bool(learned[first + 1 : end].all())
        last = end - 1 if is_text else min(end - 1, first + seq)
        cut += last < end - 1
        parts = [(at, min(seq, last - at)) for at in range(first, last, seq)]
        pieces = [(at, size) for at, size in parts if learned[at + 1 : at + size + 1].any()]
        dropped += not pieces
        firsts += [at for at, _ in pieces]
        lengths += [size for _, size in pieces]
    return ExamplePieces(np.array(firsts, np.int64), np.array(lengths, np.int64), cut, dropped)


def _unlearned(examples: ExampleSet, spec: Examples, seq: int) -> str:
    """Return the message that no example has a target, with the first example."""
    converted, example = examples.converted, int(examples.chosen[0])
    first = int(converted.ends[example - 1]) if example else 0
    ids = converted.ids[first : int(converted.ends[example])][: seq + 1]
    shown = Tokenizer(spec.tokenizer, spec.template).decoded(ids.tolist())
    return (
        f"no token of its examples is a target in the first {seq + 1:,} tokens (model.seq + 1), such as of "
        f"{shown[:200]!r}: give answers of the assistant, or data.learn 'all' (--data.learn all), or a longer model.seq"
    )
