"""How many bytes of text every id of a tokenizer stands for, by which losses a token become bits a byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Sizes = npt.NDArray[np.int64]
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a token of SentencePiece that is one byte
_SPACE = "\u2581"  # of SentencePiece
_WRITTEN = {"Metaspace", "ByteFallback"}  # decoders of tokens that are written as the text is, but for spaces


def bytes_of_ids(model: Any) -> Sizes | None:
    """Return the bytes that each id of a tokenizer stands for; special tokens stand for none.

    Args:
        model: The tokenizer of the tokenizers package.

    Returns:
        The numbers (ids,); None if the tokens do not say: those of WordPiece, say, leave spaces out.
    """
    told = json.loads(model.to_str())
    decoders = [*_decoders(told.get("decoder"))]
    kinds = {one["type"] for one in decoders}
    spaces = any(one["type"] == "Replace" and _SPACE in json.dumps(one, ensure_ascii=False) for one in decoders)
    vocab: dict[str, int] = model.get_vocab()
    sizes = np.zeros(max(vocab.values(), default=-1) + 1, np.int64)
    if "ByteLevel" in kinds:
        for token, number in vocab.items():
            sizes[number] = len(token)  # a character for each byte
    elif kinds & _WRITTEN or spaces:
        for token, number in vocab.items():
            sizes[number] = 1 if _BYTE.fullmatch(token) else len(token.replace(_SPACE, " ").encode())
    else:
        return None
    for added in told.get("added_tokens") or ():
        sizes[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return sizes


def _decoders(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each decoder."""
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for one in decoder["decoders"]:
            yield from _decoders(one)
    else:
        yield decoder
