"""Token batches as pure functions of (step, microbatch, dp), and checks of the user's text before a run starts.

First-stage workers read tokens and last-stage workers read labels themselves; no data is sent. A run can resume at any
step, on any number of workers, without loader state. torch is imported only where a tensor is made: the driver checks
the data without it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from raypar.actors.data.conversion import Convert, by_size
from raypar.actors.data.text.stretches import Int64s, Stretches, TokenWindows, drawn_blocks
from raypar.actors.data.text.text_conversion import Tokens
from raypar.actors.data.text.text_files import Facts, TextError, open_tokens
from raypar.actors.data.tokenizers.tokenizer import vocab_faults
from raypar.actors.specs.data import Text
from raypar.actors.specs.types import ProgramName

if TYPE_CHECKING:
    from torch import Tensor

UInt64s: TypeAlias = npt.NDArray[np.uint64]

# Rounds of the Feistel network. Measured chi-square per degree of freedom of the windows at four positions, for 12
# windows: 28 with four rounds, 2.9 with six, 1.2 with eight, 1.0 with ten. A round costs 10 microseconds.
_ROUNDS = 8


@dataclass(frozen=True, eq=False)  # == on arrays gives no bool
class Corpus:
    """Training and validation tokens. Open it in the process that reads it: pickling copies all tokens.

    Attributes:
        train: Stretches of a 1-d read-only memory map of uint8 (bytes), uint16 (``.bin`` and small tokenizers) or
            uint32.
        val: Stretches for validation, in the same form.
        vocab: Number of possible ids: 256 for bytes, the tokenizer's size, or max_id + 1 for ``.bin``.
        max_id: Largest id that occurs.
        fingerprint: sha256 of the sources (relative names, sizes, contents), the tokenizer and the split. It is equal
            on machines that have the same data.
    """

    train: Stretches
    val: Stretches
    vocab: int
    max_id: int
    fingerprint: str


def open_corpus(text: Text, seq: int, convert: Convert = by_size) -> Corpus:
    """Open the tokens of a text. The first call on a machine converts them; later calls take milliseconds.

    Args:
        text: The text.
        seq: Tokens of a sequence.
        convert: Converts chunks of files that are not in the cache.

    Raises:
        TextError: All faults of the text; ``text_faults`` returns them instead.
    """
    parts, faults = _open_parts(text, convert)
    TextError.raise_if(faults)
    train, val = _divided(text, parts, seq)
    drawn = [val.firsts.tolist()] if len(train.firsts) > 1 else []
    identity = repr(([facts.fingerprint for _, facts in parts.values()], len(train), len(val), *drawn))
    return Corpus(
        train=train,
        val=val,
        vocab=max(facts.vocab for _, facts in parts.values()),
        max_id=max(facts.max_id for _, facts in parts.values()),
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
    )


def text_faults(text: Text, seq: int, vocab: int, folder: str | None = None) -> list[str]:
    """Return all faults of a text for a model; [] if there are none. Each is a sentence with its fix.

    Token counts and ids are known only after conversion, so the first call converts. User mistakes raise no exception.

    Args:
        text: The user's text.
        seq: Tokens per sequence.
        vocab: The model's token ids are 0 to vocab - 1.
        folder: The Hugging Face folder from which the model is read; None if there is none.
    """
    parts, faults = _open_parts(text)
    for setting, (_, facts) in parts.items():
        faults += vocab_faults(setting, facts.max_id, facts.vocab, vocab, folder)
    if _fraction_faults(text) or parts.keys() != _paths(text).keys():
        return faults  # without a valid split there are no lengths to check
    return [*faults, *_length_faults(text, parts, seq)]


def _length_faults(text: Text, parts: dict[str, tuple[Tokens, Facts]], seq: int) -> Iterator[str]:
    """Yield a fault for each part of the text that is shorter than a window of tokens, with sizes that would fit."""
    window = seq + 1
    few = f"fewer than one window of model.seq + 1 = {window}"
    lengths = [len(stretches) for stretches in _divided(text, parts, seq)]
    if text.val_path is not None:
        for setting, length in zip(parts, lengths, strict=True):
            if length < window:
                yield f"{setting}: {_tokens(length)}, {few}: give more text{_shorter(length)}"
        return
    whole, shortest = sum(lengths), min(lengths)
    if shortest >= window:
        return
    hundredths = (number / 100 for number in range(1, 100))
    fits = (share for share in hundredths if window <= int(whole * share) <= whole - window)
    share = min(fits, key=lambda share: abs(share - text.val_fraction), default=None)
    use = "training" if lengths[0] == shortest else "validation"
    left = f"val_fraction: {text.val_fraction} leaves {shortest} of {_tokens(whole)} for {use}, {few}"
    yield f"{left}: {'' if share is None else f'set it to {share}, or '}give more text{_shorter(shortest)}"


def _shorter(length: int) -> str:
    """Return the fix that sets the longest seq whose window fits the text."""
    return f", or set model.seq to {length - 1}" if length > 1 else ""


def _tokens(count: int) -> str:
    """Return a number of tokens as text."""
    return "1 token" if count == 1 else f"{count} tokens"


def _paths(text: Text) -> dict[str, str]:
    return {"path": text.path} | ({} if text.val_path is None else {"val_path": text.val_path})


def _fraction_faults(text: Text) -> list[str]:
    if text.val_path is not None or 0 < text.val_fraction < 1:
        return []
    return [f"val_fraction: {text.val_fraction} is not between 0 and 1: set it to 0.1, say, or give val_path"]


def _open_parts(text: Text, convert: Convert = by_size) -> tuple[dict[str, tuple[Tokens, Facts]], list[str]]:
    """Open path and val_path. Return the tokens that could be opened, by setting, and all faults."""
    faults = _fraction_faults(text)
    parts: dict[str, tuple[Tokens, Facts]] = {}
    for setting, path in _paths(text).items():
        try:
            parts[setting] = open_tokens(setting, path, text.tokenizer, text.cache, convert)
        except TextError as error:
            faults += error.faults
    if len({facts.dtype == "|u1" for _, facts in parts.values()}) == 2:
        faults.append("val_path: one of path and val_path is bytes, the other token ids: give two of a kind")
    return parts, list(dict.fromkeys(faults))  # both paths may report the same tokenizer or cache fault


def _divided(text: Text, parts: dict[str, tuple[Tokens, Facts]], seq: int) -> tuple[Stretches, Stretches]:
    """Return the tokens for training and those for validation."""
    tokens = parts["path"][0]
    if "val_path" in parts:
        return Stretches.whole(tokens), Stretches.whole(parts["val_path"][0])
    if text.val_from == "blocks":
        return drawn_blocks(tokens, text.val_fraction, seq, _drawn)
    cut = len(tokens) - int(len(tokens) * text.val_fraction)
    return Stretches.whole(tokens[:cut]), Stretches.whole(tokens[cut:])


def _drawn(numbers: Int64s) -> Int64s:
    """Return a random number below 2**63 for each number."""
    return (_mix(_mix(numbers.astype(np.uint64))) >> np.uint64(1)).astype(np.int64)


class TokenBatches:
    """Tokens and labels of any microbatch of any step, without state.

    Each stretch of training tokens is cut into windows of seq + 1 tokens, together W; the last token of a window is the
    first of the next one. Samples are numbered

        n = ((step * microbatches + microbatch) * num_dp + dp) * micro_batch_size + i

    so a step takes the same samples however microbatches * num_dp is divided. Sample n is window ``n % W`` in the
    shuffled order of epoch ``n // W``: each window comes once per epoch, in a new order every time (see ``shuffled``).
    Validation windows are taken from the stretches in turn, and start again after the last one.

    Every method returns int64 tensors of shape (micro_batch_size, seq). Labels are the tokens shifted by one.
    """

    def __init__(
        self, corpus: Corpus, seq: int, micro_batch_size: int, microbatches: int, num_dp: int = 1, seed: int = 0
    ) -> None:
        """Prepare the windows; no tokens are read yet.

        Args:
            corpus: The tokens.
            seq: Tokens per sequence.
            micro_batch_size: Sequences per microbatch.
            microbatches: Microbatches per step of one data-parallel rank.
            num_dp: Data-parallel ranks.
            seed: Seed of the shuffled order.

        Raises:
            ValueError: The training or validation tokens do not fill a window.
        """
        for name, tokens in (("training", corpus.train), ("validation", corpus.val)):
            if len(tokens) < seq + 1:
                raise ValueError(f"{name} data: {len(tokens)} tokens are fewer than one window of seq + 1 = {seq + 1}")
        self.micro_batch_size, self.microbatches, self.num_dp = micro_batch_size, microbatches, num_dp
        self.seq, self.seed = seq, seed
        self._windows: Mapping[ProgramName, TokenWindows] = {
            "train": TokenWindows(corpus.train, seq),
            "evaluate": TokenWindows(corpus.val, seq, across=True),
        }
        # row k of a view holds tokens k to k + seq - 1; nothing is read until rows are taken
        self._rows: Mapping[ProgramName, npt.NDArray[Any]] = {
            "train": sliding_window_view(np.asarray(corpus.train.tokens), seq),
            "evaluate": sliding_window_view(np.asarray(corpus.val.tokens), seq),
        }

    def tokens(self, program: ProgramName, step: int, microbatch: int, dp: int = 0) -> Tensor:
        """Return the tokens of a microbatch, for the first stage."""
        return _take(self._rows[program], self._starts(program, step, microbatch, dp))

    def labels(self, program: ProgramName, step: int, microbatch: int, dp: int = 0) -> Tensor:
        """Return the labels of a microbatch, for the last stage."""
        return _take(self._rows[program], self._starts(program, step, microbatch, dp) + 1)

    def _samples(self, step: int, microbatch: int, dp: int) -> Int64s:
        if step < 0 or not 0 <= microbatch < self.microbatches or not 0 <= dp < self.num_dp:
            raise ValueError(
                f"step={step} microbatch={microbatch} dp={dp} is outside of step >= 0, "
                f"{self.microbatches} microbatches and {self.num_dp} data-parallel ranks"
            )
        first = ((step * self.microbatches + microbatch) * self.num_dp + dp) * self.micro_batch_size
        return np.arange(first, first + self.micro_batch_size)

    def _starts(self, program: ProgramName, step: int, microbatch: int, dp: int) -> Int64s:
        windows = self._windows[program]
        epoch, number = np.divmod(self._samples(step, microbatch, dp), len(windows))
        return windows.starts(shuffled(number, epoch, len(windows), self.seed) if program == "train" else number)


def _take(rows: npt.NDArray[Any], starts: Int64s) -> Tensor:
    import torch  # imported here because the driver uses this module without torch

    return torch.from_numpy(rows[starts].astype(np.int64))


def shuffled(position: Int64s, epoch: Int64s, size: int, seed: int) -> Int64s:
    """Permute positions by the permutation of ``range(size)`` that (seed, epoch) selects.

    A Feistel network permutes the numbers ``left * b + right`` of a rectangle a x b, with a = ceil(sqrt(size)) and b =
    ceil(size / a). The rectangle has fewer than a numbers too many; an element that lands on one of those is permuted
    again until it is below size (cycle walking). Each element takes O(1) time and memory.

    Args:
        position: Positions in 0 to size - 1, int64.
        epoch: Epoch of each position, int64, of the same shape.
        size: Length of the permutation.
        seed: Seed of all permutations.

    Returns:
        The permuted positions, int64, of the same shape.

    Source: Black & Rogaway 2002, generalized Feistel cipher.
    """
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    key = _mix(_mix(np.full(epoch.shape, seed % 2**64, np.uint64)) ^ epoch.astype(np.uint64))
    keys = [_mix(key + np.uint64(number)) for number in range(_ROUNDS)]
    permuted = _feistel(position.astype(np.uint64), keys, a, b)
    while (outside := permuted >= size).any():
        permuted = np.where(outside, _feistel(permuted, keys, a, b), permuted)
    return permuted.astype(np.int64)


def _feistel(number: UInt64s, keys: list[UInt64s], a: int, b: int) -> UInt64s:
    """Permute 0 to a * b - 1: each round adds a hash of one half to the other half, which can be undone."""
    left, right = np.divmod(number, np.uint64(b))
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        left = (left + _mix(right ^ even)) % np.uint64(a)
        right = (right + _mix(left ^ odd)) % np.uint64(b)
    return left * np.uint64(b) + right


def _mix(number: UInt64s) -> UInt64s:
    """Apply one step of SplitMix64: each input bit flips half of the output bits. Wraps at 2**64.

    Source: Steele et al. 2014.
    """
    number = number + np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))
