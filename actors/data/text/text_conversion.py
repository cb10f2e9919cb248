"""The conversion of text: each chunk to token ids, independently, so that several processes can share the chunks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from raypar.actors.data.tokenizers.tokenizer import read_tokenizer, tokenizer_file

Tokens: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class TextConversion:
    """Turns text into token ids, one chunk a call.

    Args:
        tokenizer: A tokenizers JSON file, or a folder with a tokenizer.json; None for bytes.
    """

    tokenizer: str | None

    def __call__(self, block: bytes) -> bytes:
        """Return the ids of a chunk of text, as bytes in ``dtype``. Raises ValueError if the tokenizer fails."""
        if self.tokenizer is None:
            return block
        try:
            ids = self._model.encode(block.decode(errors="replace"), add_special_tokens=False).ids
        except Exception as error:  # tokenizers raises Exception itself, for a word without a token, say
            raise ValueError(f"the tokenizer fails: {error}") from error
        return np.array(ids, self.dtype).tobytes()

    @cached_property
    def vocab(self) -> int:
        """Number of possible ids, from 0. More than ``get_vocab_size()`` if a tokenizer's ids have holes."""
        return 256 if self.tokenizer is None else max(self._model.get_vocab().values(), default=-1) + 1

    @property
    def dtype(self) -> str:
        """Numpy's name of the dtype of the ids: "|u1" (bytes), "<u2" or "<u4"."""
        return "|u1" if self.tokenizer is None else "<u2" if self.vocab <= 1 << 16 else "<u4"

    def faults(self) -> list[str]:
        """Return why the tokenizer can't be used; [] if it can."""
        try:
            self._model  # noqa: B018
        except ImportError:
            return ["tokenizer: it needs the tokenizers package: pip install tokenizers"]
        except Exception as error:  # tokenizers raises Exception itself
            return [f"tokenizer: {self.tokenizer!r} is not a tokenizers JSON file ({error}): give a tokenizer.json"]
        return []

    @cached_property
    def _model(self) -> Any:
        return None if self.tokenizer is None else read_tokenizer(tokenizer_file(self.tokenizer))
