"""The conversion of examples: each block to token ids and masks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from raypar.actors.data.examples.example_blocks import examples_in
from raypar.actors.data.tokenizers.example_shapes import ExampleError, ExampleText, example_as_text
from raypar.actors.data.tokenizers.tokenizer import Mask, Tokenizer
from raypar.actors.specs.data import Learned

MOST_NAMED = 5  # faulty examples that a message names
ExampleFaults: TypeAlias = dict[str, tuple[str, int]]  # by fault: its first example, and the number of its examples


class Tokens(NamedTuple):
    """The examples of a block as tokens.

    Attributes:
        lengths: Number of tokens of each.
        ids: Token ids of all examples, concatenated.
        loss_mask: 1 for each token that is a target, else 0.
        read: Number of examples in the block, including faulty ones.
        faults: By fault, its first example and the number of its examples.
    """

    lengths: Sequence[int]
    ids: npt.NDArray[np.unsignedinteger[Any]]
    loss_mask: Mask
    read: int
    faults: ExampleFaults


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
        faults = ExampleFaults()
        found = [*self.opened.tokens_with_loss_mask([*self._written(block, faults)])]
        read = len(found) + sum(count for _, count in faults.values())
        first = dict(islice(faults.items(), MOST_NAMED + 1))
        head = json.dumps({"lengths": [len(one.ids) for one in found], "read": read, "faults": first})
        ids = [one.ids.astype(self.dtype).tobytes() for one in found]
        return b"".join([head.encode(), b"\n", *ids, *(one.loss_mask.tobytes() for one in found)])

    def tokens(self, answer: bytes) -> Tokens:
        """Return the result of a call as arrays."""
        raw, _, body = answer.partition(b"\n")
        head, dtype = json.loads(raw), np.dtype(self.dtype)
        count = sum(head["lengths"])
        ids = np.frombuffer(body, dtype, count)
        learned = np.frombuffer(body, np.uint8, count, offset=count * dtype.itemsize)
        faults = {why: (where, number) for why, (where, number) in head["faults"].items()}
        return Tokens(head["lengths"], ids, learned, head["read"], faults)

    @cached_property
    def opened(self) -> Tokenizer:
        """The tokenizer. Raises ExampleError if a file can't be read, or a package is missing."""
        return Tokenizer(self.tokenizer, self.template)

    @property
    def dtype(self) -> str:
        """Numpy's name of the dtype of the ids: "<u2" or "<u4"."""
        return "<u2" if self.opened.num_ids <= 1 << 16 else "<u4"

    def _written(self, block: bytes, faults: ExampleFaults) -> Iterator[ExampleText]:
        """Yield the examples of a block as text. Faults are added to ``faults``."""
        template, end = self.opened.template, self.opened.end
        for where, record in examples_in(block):
            try:
                if isinstance(record, ExampleError):
                    raise record
                yield example_as_text(record, template, end, learns_all=self.learn == "all")
            except ExampleError as error:
                add_fault(faults, str(error), f"{where} ")


def add_fault(faults: ExampleFaults, why: str, where: str, count: int = 1) -> None:
    """Count a fault of examples.

    Args:
        faults: The faults so far; updated.
        why: The fault.
        where: The first example that has it.
        count: Number of examples that have it.
    """
    first, before = faults.get(why, (where, 0))
    faults[why] = first, before + count


def fault_lines(faults: ExampleFaults, read: int) -> list[str]:
    """Return one line for each fault; the first ``MOST_NAMED`` if there are many.

    Args:
        faults: The faults.
        read: Number of examples that were read.
    """
    return [
        f"{where}{why}" + (f" (and {count - 1} more of the {read} examples that were read)" if count > 1 else "")
        for why, (where, count) in islice(faults.items(), MOST_NAMED)
    ]
