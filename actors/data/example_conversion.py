"""The conversion of examples: blocks of them to token ids and masks, each by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raypar.actors.data.example_blocks import examples_in
from raypar.actors.data.example_shapes import ExampleError, Written, written
from raypar.actors.data.tokenizer import Mask, Tokenizer
from raypar.actors.specs.data import Learned

MOST_TOLD = 5  # examples that are named for what is wrong with them


class Tokens(NamedTuple):
    """The examples of a block as tokens.

    Attributes:
        lengths: Number of tokens of each.
        ids: Their ids, one example after the other.
        learned: 1 for each that is a target, else 0.
        faults: What is wrong with the first ones that are.
    """

    lengths: Sequence[int]
    ids: npt.NDArray[np.unsignedinteger[Any]]
    learned: Mask
    faults: Sequence[str]


@dataclass(frozen=True)
class ExampleConversion:
    """Turns blocks of examples into tokens.

    Args:
        tokenizer: See ``Examples.tokenizer``.
        template: See ``Examples.template``.
        learn: See ``Examples.learn``.
    """

    tokenizer: str | None
    template: str | None
    learn: Learned

    def __call__(self, block: bytes) -> bytes:
        """Return the tokens of a block, for ``tokens``. Raises ExampleError if the tokenizer or a package fails."""
        faults = list[str]()
        found = [*self.opened.tokenized([*self._written(block, faults)])]
        head = json.dumps({"lengths": [len(one.ids) for one in found], "faults": faults[: MOST_TOLD + 1]})
        ids = [one.ids.astype(self.dtype).tobytes() for one in found]
        return b"".join([head.encode(), b"\n", *ids, *(one.learned.tobytes() for one in found)])

    def tokens(self, answer: bytes) -> Tokens:
        """Return what a call has returned as arrays."""
        raw, _, body = answer.partition(b"\n")
        head, dtype = json.loads(raw), np.dtype(self.dtype)
        count = sum(head["lengths"])
        ids = np.frombuffer(body, dtype, count)
        learned = np.frombuffer(body, np.uint8, count, offset=count * dtype.itemsize)
        return Tokens(head["lengths"], ids, learned, head["faults"])

    @cached_property
    def opened(self) -> Tokenizer:
        """The tokenizer. Raises ExampleError if a file can't be read, or a package is missing."""
        return Tokenizer(self.tokenizer, self.template)

    @property
    def dtype(self) -> str:
        """Numpy's name of the dtype of the ids: "<u2" or "<u4"."""
        return "<u2" if self.opened.num_ids <= 1 << 16 else "<u4"

    def _written(self, block: bytes, faults: list[str]) -> Iterator[Written]:
        """Yield the examples of a block as text. What is wrong is appended to ``faults``."""
        template, end = self.opened.template, self.opened.end
        for where, record in examples_in(block):
            if isinstance(record, ExampleError):
                faults.append(str(record))
                continue
            try:
                yield written(record, template, end, learns_all=self.learn == "all")
            except ExampleError as error:
                faults.append(f"{where} {error}")
