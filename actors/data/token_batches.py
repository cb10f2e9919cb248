"""Batches as pure functions of (step, microbatch, dp), and the checks of the user's text before a run starts.

First-stage workers read tokens, last-stage workers read labels, and nobody ships data. Resuming at any step, on any
number of workers, needs no loader state. torch is imported where a tensor is made and nowhere else: the driver checks
the data without it.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from raypar.actors.data.text_files import Facts, TextError, Tokens, open_tokens
from raypar.actors.specs.data import Text

if TYPE_CHECKING:
    from torch import Tensor

UInt64s: TypeAlias = npt.NDArray[np.uint64]
Int64s: TypeAlias = npt.NDArray[np.int64]

# Rounds of the Feistel network. Chi-square a degree of freedom over the windows at four places, of 12 windows: 28 with
# four rounds, 2.9 with six, 1.2 with eight, 1.0 with ten. A round costs 10 microseconds.
_ROUNDS = 8


@dataclass(frozen=True, eq=False)  # arrays do not compare to a bool
class Corpus:
    """Training and validation tokens. Open it in the process that reads it: pickled, it would be copied whole.

    train, val   1-d read-only memory maps: uint8 (bytes), uint16 (``.bin`` and small tokenizers) or uint32
    vocab        ids that can occur: 256 for bytes, the tokenizer's size, or max_id + 1 for ``.bin``
    max_id       largest id that does occur
    fingerprint  sha256 of what train and val are made of (relative names, sizes, contents, tokenizer, where they are
                 split): equal on machines that have the same data
    """

    train: Tokens
    val: Tokens
    vocab: int
    max_id: int
    fingerprint: str


def open_corpus(text: Text) -> Corpus:
    """Open the tokens that ``text`` names. The first call on a machine converts them, later ones take milliseconds.

    Raises ValueError with all faults of the text; ``data_faults`` returns them instead.
    """
    parts, faults = _open_parts(text)
    if faults:
        raise TextError(faults)
    train, val = _split(text, parts)
    identity = repr(([facts.fingerprint for _, facts in parts.values()], len(train), len(val)))
    return Corpus(
        train=train,
        val=val,
        vocab=max(facts.vocab for _, facts in parts.values()),
        max_id=max(facts.max_id for _, facts in parts.values()),
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
    )


def data_faults(text: Text, seq: int, vocab: int) -> list[str]:
    """All that is wrong with ``text`` for a model of ``seq`` tokens a sequence and ids 0 to vocab - 1; [] if nothing.

    Each fault is a sentence with its fix. Token counts and ids are known only after conversion, so the first call
    converts. Does not raise for user mistakes.
    """
    parts, faults = _open_parts(text)
    for setting, (_, facts) in parts.items():
        if facts.max_id >= vocab:
            faults.append(
                f"{setting}: the largest token id is {facts.max_id}, but the model's vocab is {vocab}: "
                f"set vocab to {facts.vocab}, or use a tokenizer with fewer ids"
            )
    if _fraction_faults(text) or parts.keys() != _paths(text).keys():
        return faults  # there is no split to look at
    longer = "a longer data.val_path" if text.val_path is not None else "more text, or a larger data.val_fraction"
    for name, tokens, fix in zip(
        ("training", "validation"), _split(text, parts), ("give more text", f"give {longer}"), strict=True
    ):
        if len(tokens) < seq + 1:
            faults.append(
                f"{name} data: {len(tokens)} tokens are fewer than one window of seq + 1 = {seq + 1}: "
                f"{fix} or lower the model's seq"
            )
    return faults


def _paths(text: Text) -> dict[str, str]:
    return {"path": text.path} | ({} if text.val_path is None else {"val_path": text.val_path})


def _fraction_faults(text: Text) -> list[str]:
    if text.val_path is not None or 0 < text.val_fraction < 1:
        return []
    return [f"val_fraction: {text.val_fraction} is not between 0 and 1: set it to 0.1, say, or give val_path"]


def _open_parts(text: Text) -> tuple[dict[str, tuple[Tokens, Facts]], list[str]]:
    """Those of path and val_path that can be opened, and what is wrong with the text."""
    faults = _fraction_faults(text)
    parts: dict[str, tuple[Tokens, Facts]] = {}
    for setting, path in _paths(text).items():
        try:
            parts[setting] = open_tokens(setting, path, text.tokenizer, text.cache)
        except TextError as error:
            faults += error.faults
    if len({facts.dtype == "|u1" for _, facts in parts.values()}) == 2:
        faults.append("val_path: one of path and val_path is bytes, the other token ids: give two of a kind")
    return parts, list(dict.fromkeys(faults))  # both paths may have met the same tokenizer or cache fault


def _split(text: Text, parts: dict[str, tuple[Tokens, Facts]]) -> tuple[Tokens, Tokens]:
    tokens = parts["path"][0]
    if "val_path" in parts:
        return tokens, parts["val_path"][0]
    cut = len(tokens) - int(len(tokens) * text.val_fraction)
    return tokens[:cut], tokens[cut:]


class TokenBatches:
    """Tokens and labels of any microbatch of any step, without state.

    The training tokens are cut into W = (len - 1) // seq windows of seq + 1 tokens, the last token of a window being
    the first of the next one. Samples are numbered

        n = ((step * microbatches + microbatch) * num_dp + dp) * micro_batch_size + i

    so a step takes the same samples however microbatches * num_dp is divided. Sample n is window ``n % W`` of the
    shuffled order of epoch ``n // W``: every window once an epoch, in another order each time (see ``shuffled``).
    Validation windows come in order and start again at the end.

    Every method returns int64 tensors of shape (micro_batch_size, seq); labels are the tokens shifted by one.
    """

    def __init__(
        self, corpus: Corpus, seq: int, micro_batch_size: int, microbatches: int, num_dp: int = 1, seed: int = 0
    ) -> None:
        """``microbatches`` are those of one data-parallel rank a step. Raises ValueError if a part has no window."""
        for name, tokens in (("training", corpus.train), ("validation", corpus.val)):
            if len(tokens) < seq + 1:
                raise ValueError(f"{name} data: {len(tokens)} tokens are fewer than one window of seq + 1 = {seq + 1}")
        self.micro_batch_size, self.microbatches, self.num_dp = micro_batch_size, microbatches, num_dp
        self.seq, self.seed = seq, seed
        self.train_windows = (len(corpus.train) - 1) // seq
        self.val_windows = (len(corpus.val) - 1) // seq
        # row k of a view is tokens k to k + seq - 1; nothing is read until rows are taken
        self._train = sliding_window_view(np.asarray(corpus.train), seq)
        self._val = sliding_window_view(np.asarray(corpus.val), seq)

    def train(self, step: int, microbatch: int, dp: int = 0) -> tuple[Tensor, Tensor]:
        """(tokens, labels) of a training microbatch."""
        starts = self._train_starts(step, microbatch, dp)
        return _take(self._train, starts), _take(self._train, starts + 1)

    def train_tokens(self, step: int, microbatch: int, dp: int = 0) -> Tensor:
        """What the first stage needs of ``train``."""
        return _take(self._train, self._train_starts(step, microbatch, dp))

    def train_labels(self, step: int, microbatch: int, dp: int = 0) -> Tensor:
        """What the last stage needs of ``train``."""
        return _take(self._train, self._train_starts(step, microbatch, dp) + 1)

    def val(self, step: int, microbatch: int, dp: int = 0) -> tuple[Tensor, Tensor]:
        """(tokens, labels) of a validation microbatch."""
        return self.val_tokens(step, microbatch, dp), self.val_labels(step, microbatch, dp)

    def val_tokens(self, step: int, microbatch: int, dp: int = 0) -> Tensor:
        """What the first stage needs of ``val``."""
        return _take(self._val, self._val_starts(step, microbatch, dp))

    def val_labels(self, step: int, microbatch: int, dp: int = 0) -> Tensor:
        """What the last stage needs of ``val``."""
        return _take(self._val, self._val_starts(step, microbatch, dp) + 1)

    def _samples(self, step: int, microbatch: int, dp: int) -> Int64s:
        if step < 0 or not 0 <= microbatch < self.microbatches or not 0 <= dp < self.num_dp:
            raise ValueError(
                f"step={step} microbatch={microbatch} dp={dp} is outside of step >= 0, "
                f"{self.microbatches} microbatches and {self.num_dp} data-parallel ranks"
            )
        first = ((step * self.microbatches + microbatch) * self.num_dp + dp) * self.micro_batch_size
        return np.arange(first, first + self.micro_batch_size)

    def _train_starts(self, step: int, microbatch: int, dp: int) -> Int64s:
        epoch, position = np.divmod(self._samples(step, microbatch, dp), self.train_windows)
        return shuffled(position, epoch, self.train_windows, self.seed) * self.seq

    def _val_starts(self, step: int, microbatch: int, dp: int) -> Int64s:
        return self._samples(step, microbatch, dp) % self.val_windows * self.seq


def _take(rows: npt.NDArray[Any], starts: Int64s) -> Tensor:
    import torch  # here and not above: the driver reads this module without torch

    return torch.from_numpy(rows[starts].astype(np.int64))


def shuffled(position: Int64s, epoch: Int64s, size: int, seed: int) -> Int64s:
    """Where ``position`` (each in 0 to size - 1) goes in the permutation of ``range(size)`` that (seed, epoch) names.

    Takes arrays of one shape and O(1) time and memory for each element: a Feistel network permutes the rectangle
    a x b of numbers ``left * b + right`` with a = ceil(sqrt(size)), b = ceil(size / a) (Black & Rogaway 2002), which
    has fewer than a numbers too many; an element that lands on one of those walks on until it is below size.
    """
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    key = _mix(_mix(np.full(epoch.shape, seed % 2**64, np.uint64)) ^ epoch.astype(np.uint64))
    keys = [_mix(key + np.uint64(number)) for number in range(_ROUNDS)]
    place = _feistel(position.astype(np.uint64), keys, a, b)
    while (outside := place >= size).any():
        place = np.where(outside, _feistel(place, keys, a, b), place)
    return place.astype(np.int64)


def _feistel(number: UInt64s, keys: list[UInt64s], a: int, b: int) -> UInt64s:
    """A permutation of 0 to a * b - 1: each round adds to one half what the other one says, and so can be undone."""
    left, right = np.divmod(number, np.uint64(b))
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        left = (left + _mix(right ^ even)) % np.uint64(a)
        right = (right + _mix(left ^ odd)) % np.uint64(b)
    return left * np.uint64(b) + right


def _mix(number: UInt64s) -> UInt64s:
    """A step of SplitMix64 (Steele et al. 2014): every bit in moves half of the bits out. Wraps around at 2**64."""
    number = number + np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))
