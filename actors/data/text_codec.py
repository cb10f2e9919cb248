"""From text to token ids and back: bytes, or a tokenizer in a file of the ``tokenizers`` package. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from raypar.actors.errors import FaultsError
from raypar.actors.files import expanded

_ENDS = ("generation_config.json", "config.json")  # where folders of Hugging Face say which ids end a text


class CodecError(FaultsError, ValueError):
    """A tokenizer can't be read."""


class TextCodec:
    """Turns text into token ids and back.

    Args:
        file: A tokenizers JSON file; None for bytes, whose ids are their values.

    Attributes:
        ends: Ids that end a text, as the files beside ``file`` say.

    Raises:
        CodecError: The file can't be read, or the package is missing.
    """

    def __init__(self, file: str | None) -> None:
        self._model: Any = None if file is None else _loaded(file)
        self.ends = frozenset[int]() if file is None else _ends_beside(expanded(file))

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text."""
        if self._model is None:
            return tuple(text.encode())
        return tuple(self._model.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without what no character can be made of; special tokens are left out."""
        if self._model is None:
            return bytes(token for token in tokens if token < 256).decode(errors="replace")
        text: str = self._model.decode(list(tokens))
        return text


class TextStream:
    """The text of tokens that arrive one by one: each character as soon as it is whole.

    Args:
        tokenizer: The tokenizer.

    Attributes:
        text: The text so far, of whole characters.
    """

    def __init__(self, tokenizer: TextCodec) -> None:
        self._tokenizer, self._tokens, self.text = tokenizer, list[int](), ""

    def add(self, token: int) -> str:
        """Take a token, and return what it adds to the text."""
        self._tokens.append(token)
        whole = self._tokenizer.decode(self._tokens).rstrip("\ufffd")
        added, self.text = whole[len(self.text) :], max(self.text, whole, key=len)
        return added


def _loaded(file: str) -> Any:
    try:
        from tokenizers import Tokenizer as Model  # optional dependency

        model = Model.from_file(str(expanded(file)))
    except ImportError:
        raise CodecError(["tokenizer: it needs the tokenizers package: pip install 'raypar[hf]'"]) from None
    except Exception as error:  # tokenizers raises Exception itself
        told = f"tokenizer: {file!r} is not a tokenizers JSON file ({error}): give a tokenizer.json"
        raise CodecError([told]) from error
    model.no_truncation()
    model.no_padding()
    return model


def _ends_beside(file: Path) -> frozenset[int]:
    """Return the ids that end a text, of the first file beside a tokenizer that says it."""
    for name in _ENDS:
        try:
            found = json.loads((file.parent / name).read_bytes())
        except (OSError, ValueError):
            continue
        ends = found.get("eos_token_id") if isinstance(found, dict) else None
        if ends is not None:
            every: Iterable[Any] = ends if isinstance(ends, list) else [ends]
            return frozenset(one for one in every if isinstance(one, int))
    return frozenset()
